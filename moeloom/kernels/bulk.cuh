// Copies by the copy engine: one thread starts one, and bytes are under way without registers or further instructions.
#pragma once
#include "signals.cuh"

namespace moeloom {

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// A barrier in shared memory that flips when the bytes announced to it have come.
__device__ __forceinline__ void init_barrier(u64* full) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(full)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void announce(u64* full, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(full)), "r"(bytes)
                 : "memory");
}

// No deadline: what is waited for is a read of this GPU's own memory that has begun.
__device__ __forceinline__ void await_bytes(u64* full, u32 phase) {
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(shared_address(full)),
        "r"(phase)
        : "memory");
}

__device__ __forceinline__ void bulk_load(void* to, const void* from, u32 bytes, u64* full) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(full))
                 : "memory");
}

// Into the second-level cache.
__device__ __forceinline__ void prefetch_bytes(const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void prefetch_line(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// Each store is a group of its own, of the thread that starts it.
__device__ __forceinline__ void bulk_store(void* to, const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n cp.async.bulk.commit_group;" ::"l"(to),
                 "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}

// The same for what is not read again soon: it leaves the second-level cache before what is.
__device__ __forceinline__ void bulk_store_streaming(void* to, const void* from, u32 bytes) {
    asm volatile(
        "{ .reg .b64 first_out;\n createpolicy.fractional.L2::evict_first.b64 first_out, 1.0;\n"
        " cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, first_out;\n"
        " cp.async.bulk.commit_group; }" ::"l"(to),
        "r"(shared_address(from)), "r"(bytes)
        : "memory");
}

// This thread's stores have read their shared memory: it may be overwritten.
__device__ __forceinline__ void await_stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// They are written: a flag may say so.
__device__ __forceinline__ void await_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Between a flag that this thread has seen and a bulk load of what it announces.
__device__ __forceinline__ void fence_before_load() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Between ordinary writes to shared memory and a bulk store of them, by every writer.
__device__ __forceinline__ void fence_before_store() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace moeloom
