// Tiles by the copy engine: boxes of tensors in global memory, described by maps that the host makes; and rings of
// places in shared memory between the one who fills them and those who read.
#pragma once
#include "bulk.cuh"

namespace moeloom {

struct alignas(64) TensorMap {
    u64 words[16];
};

// What a box has outside the tensor is zeros, and counts as bytes that have come.
__device__ __forceinline__ void load_box(void* to, const TensorMap& map, u64* full, int x, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
            "r"(shared_address(to)), "l"(&map), "r"(shared_address(full)), "r"(x), "r"(row)
        : "memory");
}

__device__ __forceinline__ void load_box(void* to, const TensorMap& map, u64* full, int x, int row, int half, int slot) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}],"
        " [%2];" ::"r"(shared_address(to)),
        "l"(&map), "r"(shared_address(full)), "r"(x), "r"(row), "r"(half), "r"(slot)
        : "memory");
}

__device__ __forceinline__ void init_barrier(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void show_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

template <int places>
struct Ring {
    u64 full[places];
    u64 empty[places];

    // readers: how many arrive when they have read a place
    __device__ __forceinline__ void init(u32 readers) {
        for (int i = 0; i < places; ++i) {
            moeloom::init_barrier(&full[i], 1);
            moeloom::init_barrier(&empty[i], readers);
        }
    }
};

// Where someone stands in a ring: all go through its places in the same order.
template <int places>
struct Position {
    static_assert((places & (places - 1)) == 0);
    u32 count = 0;  // of places left behind

    __device__ __forceinline__ int place() const { return count % places; }

    __device__ __forceinline__ u32 phase() const { return count / places & 1; }

    __device__ __forceinline__ void await_full(Ring<places>& ring) const { await_bytes(&ring.full[place()], phase()); }

    __device__ __forceinline__ void await_empty(Ring<places>& ring) const {
        await_bytes(&ring.empty[place()], phase() ^ 1);
    }
};

}  // namespace moeloom
