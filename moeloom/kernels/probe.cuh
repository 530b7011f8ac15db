// What `moeloom measure` times: launches, reads, copies with either end on a peer, and words that GPUs pass to and fro.
#pragma once
#include "bulk.cuh"

namespace moeloom {

constexpr int PROBE_THREADS = 1024;
constexpr int PROBE_VECTORS = 8;  // that a thread has under way
constexpr int PROBE_TILE = 8192;  // bytes of a bulk copy
constexpr int PROBE_STAGES = 24;  // tiles of shared memory; of them
constexpr int PROBE_LEAVING = 6;  // may be on their way out while the others come in

struct ProbeShared {
    alignas(128) unsigned char tiles[PROBE_STAGES][PROBE_TILE];
    u64 full[PROBE_STAGES];
};

__device__ __forceinline__ Vector load_past_l1(const Vector* p) {
    Vector v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

// What is left of a kernel that does nothing is its launch.
__global__ void __launch_bounds__(PROBE_THREADS) probe_nothing() {}

// Keeps the stream busy while the host queues up what is timed behind it.
__global__ void __launch_bounds__(PROBE_THREADS) probe_rest(i64 duration_ns) {
    const u64 end = nanoseconds() + duration_ns;
    while (nanoseconds() < end) __nanosleep(500);
}

// Reads pieces of PROBE_THREADS * PROBE_VECTORS vectors; `sum` gets the exclusive or of all words of all passes. Each
// pass gives a block other pieces, as it may have its own in its first-level cache.
__global__ void __launch_bounds__(PROBE_THREADS, 1) probe_read(const Vector* from, i64 pieces, i64 passes, u32* sum) {
    __shared__ u32 of_block;
    if (threadIdx.x == 0) of_block = 0;
    __syncthreads();
    u32 own = 0;
    for (i64 pass = 0; pass < passes; ++pass) {
        for (i64 piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
            const i64 which = (piece + pass * 5) % pieces;
            const Vector* p = from + which * (PROBE_THREADS * PROBE_VECTORS) + threadIdx.x;
            Vector v[PROBE_VECTORS];
#pragma unroll
            for (int i = 0; i < PROBE_VECTORS; ++i) v[i] = load_past_l1(p + i * PROBE_THREADS);
#pragma unroll
            for (int i = 0; i < PROBE_VECTORS; ++i) own ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
        }
    }
    own = __reduce_xor_sync(~0u, own);
    if (lane_id() == 0) atomicXor(&of_block, own);
    __syncthreads();
    if (threadIdx.x == 0) atomicXor(sum, of_block);
}

// As many pieces of the same size, by loads and stores.
__global__ void __launch_bounds__(PROBE_THREADS, 1) probe_copy(Vector* to, const Vector* from, i64 pieces) {
    for (i64 piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
        const i64 at = piece * (PROBE_THREADS * PROBE_VECTORS) + threadIdx.x;
        Vector v[PROBE_VECTORS];
#pragma unroll
        for (int i = 0; i < PROBE_VECTORS; ++i) v[i] = load_past_l1(from + at + i * PROBE_THREADS);
#pragma unroll
        for (int i = 0; i < PROBE_VECTORS; ++i) store_row(to + at + i * PROBE_THREADS, v[i]);
    }
}

// Whether they have come before the deadline. What they come from may be a peer.
__device__ __forceinline__ bool bytes_came(u64* full, u32 phase, u64 deadline) {
    for (u32 polls = 1;; ++polls) {
        u32 done;
        asm volatile(
            "{ .reg .pred done;\n"
            " mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
            " selp.u32 %0, 1, 0, done; }"
            : "=r"(done)
            : "r"(shared_address(full)), "r"(phase)
            : "memory");
        if (done) return true;
        if (polls % 256 == 0 && nanoseconds() > deadline) return false;
    }
}

// The same by bulk copies through shared memory, started by one thread of each block. `late` is set if it gave up.
__global__ void __launch_bounds__(32) probe_bulk(unsigned char* to, const unsigned char* from, int tiles,
                                                 i64 timeout_ns, u32* late) {
    extern __shared__ __align__(128) unsigned char memory[];
    ProbeShared& shared = *reinterpret_cast<ProbeShared*>(memory);
    if (threadIdx.x) return;
    const u64 deadline = nanoseconds() + timeout_ns;
    for (int stage = 0; stage < PROBE_STAGES; ++stage) init_barrier(&shared.full[stage]);
    const int first = blockIdx.x, step = gridDim.x;
    auto load = [&](int tile, int stage) {
        announce(&shared.full[stage], PROBE_TILE);
        bulk_load(shared.tiles[stage], from + (i64)tile * PROBE_TILE, PROBE_TILE, &shared.full[stage]);
    };
    int loading = first;
    for (int stage = 0; stage < PROBE_STAGES && loading < tiles; ++stage, loading += step) load(loading, stage);
    int stage = 0, leaving = -PROBE_LEAVING;
    u32 phase = 0;
    for (int tile = first; tile < tiles; tile += step) {
        if (!bytes_came(&shared.full[stage], phase, deadline)) {
            *late = 1;
            break;
        }
        bulk_store(to + (i64)tile * PROBE_TILE, shared.tiles[stage], PROBE_TILE);
        if (++stage == PROBE_STAGES) stage = 0, phase ^= 1;
        if (leaving >= 0 && loading < tiles) {  // the store begun PROBE_LEAVING tiles ago has read its stage
            asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PROBE_LEAVING) : "memory");
            load(loading, leaving);
            loading += step;
        }
        if (++leaving == PROBE_STAGES) leaving = 0;
    }
    await_stores();
}

// What probe_signal leaves behind.
struct ProbePassed {
    u64 nanoseconds;  // from the end of the first round to the end of the last
    u32 rounds;       // that were completed
    u32 unused;
};

// Words first, first + 1, ... go back and forth between this GPU, which waits at `own`, and the one that waits at
// `theirs`; where both begin, each round is a barrier of the two.
__global__ void __launch_bounds__(32) probe_signal(u32* own, u32* theirs, u32 begins, u32 first, u32 rounds,
                                                   i64 timeout_ns, ProbePassed* passed) {
    if (threadIdx.x) return;
    u64 start = nanoseconds();
    const u64 deadline = start + timeout_ns;
    u32 done = 0;
    for (; done < rounds; ++done) {
        const u32 word = first + done;
        if (begins) store_release(theirs, word);
        for (u32 polls = 1; (int)(load_acquire(own) - word) < 0; ++polls) {
            if (polls % 256 == 0 && nanoseconds() > deadline) {
                passed->rounds = done;
                return;
            }
        }
        if (!begins) store_release(theirs, word);
        if (done == 0) start = nanoseconds();
    }
    passed->nanoseconds = nanoseconds() - start;
    passed->rounds = done;
}

}  // namespace moeloom
