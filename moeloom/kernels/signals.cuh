// How ranks announce and wait: words with one writer each, epochs instead of resets, and a deadline on every wait.
#pragma once

namespace moeloom {

using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// Local to a rank: survives between launches. `epoch` counts finished operations, so that a replayed graph goes on.
struct State {
    u32 epoch;        // of the last finished launch
    u32 finished;     // blocks that have ended in this launch
    u32 tickets[4];   // work handed out in this launch, by role
    u32 aborted;      // set by the first wait past its deadline, here or on a peer; cleared by the host
    u32 phase;        // what was waited for, for the message
    u32 peer;         // for whom
};

__device__ __forceinline__ u64 nanoseconds() {
    u64 t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

__device__ __forceinline__ u32 load_acquire(const u32* word) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ u64 load_acquire(const u64* word) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

// Everything that this thread, and those it has synchronised with, wrote before is visible to who acquires the word.
__device__ __forceinline__ void store_release(u32* word, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ __forceinline__ void store_release(u64* word, u64 value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ __forceinline__ void sync_threads(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Waits until ready(), or the deadline; from then on every wait of this launch counts as satisfied.
template <class Ready>
__device__ __forceinline__ void wait_until(State* state, u64 deadline, u32 phase, u32 peer, Ready ready) {
    for (u32 polls = 1; !ready(); ++polls) {
        if (polls % 256) continue;
        if (*(volatile u32*)&state->aborted) return;
        if (nanoseconds() > deadline) {
            state->phase = phase;
            state->peer = peer;
            __threadfence();
            *(volatile u32*)&state->aborted = 1;
            return;
        }
    }
}

// The last block of a rank makes the launch count and hands the tickets back.
__device__ __forceinline__ void end_launch(State* state, u32 epoch, u32 blocks) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        if (atomicAdd(&state->finished, 1) == blocks - 1) {
            state->finished = 0;
            for (int i = 0; i < 4; ++i) state->tickets[i] = 0;
            __threadfence();
            state->epoch = epoch;
        }
    }
}

__device__ __forceinline__ u32 lane_id() { return threadIdx.x & 31; }

constexpr int NOT_HERE = -1, NO_ROOM = -2;  // of a (token, slot) pair: its expert is elsewhere; it was dropped

// Rows move in units of 16 bytes.
using Vector = uint4;

// Of rows that are read once: they need no place in the first-level cache.
__device__ __forceinline__ Vector load_row(const Vector* p) {
    Vector v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p)
                 : "memory");
    return v;
}

__device__ __forceinline__ void store_row(Vector* p, Vector v) {
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

}  // namespace moeloom
