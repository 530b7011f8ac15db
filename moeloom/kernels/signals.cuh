// How ranks announce and wait: words with one writer each, epochs instead of resets, and a deadline on every wait.
#pragma once

namespace moeloom {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr int MAX_RANKS = 8;

// A line of its own: draws from one counter do not queue behind those from another.
struct alignas(128) Counter {
    u32 value;
};

// Local to a rank: survives between launches. `epoch` counts finished operations, so that a replayed graph goes on.
struct State {
    u32 epoch;            // of the last finished launch
    u32 aborted;          // set by the first wait past its deadline; cleared by the host
    u32 phase;            // what was waited for, for the message
    u32 peer;             // for whom
    Counter finished;     // blocks that have drawn their last ticket in this launch
    Counter tickets[4];   // work handed out in this launch, by role
};

// Rows move in units of 16 bytes.
using Vector = uint4;

constexpr int NOT_HERE = -1, NO_ROOM = -2;  // of a (token, slot) pair: its expert is elsewhere; it was dropped

__device__ __forceinline__ u32 lane_id() { return threadIdx.x & 31; }

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

// Everything that this thread, and those it has synchronised with, wrote before is visible to who acquires the word.
__device__ __forceinline__ void store_release(u32* word, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// Words that bring their epoch with them need no fence and no second trip: 16 bytes are written and read as one. Who
// loads one must use all of it: else ptxas reads the parts that are used one by one, the first perhaps too early.
__device__ __forceinline__ void store_word(void* to, u32 a, u32 b, u32 c, u32 epoch) {
    asm volatile(
        "{ .reg .b64 lo, hi; .reg .b128 word;\n mov.b64 lo, {%1, %2};\n mov.b64 hi, {%3, %4};\n mov.b128 word, {lo, hi};\n"
        " st.relaxed.sys.global.b128 [%0], word; }" ::"l"(to), "r"(a), "r"(b), "r"(c), "r"(epoch)
        : "memory");
}

__device__ __forceinline__ Vector load_word(const void* from) {
    Vector v;
    asm volatile(
        "{ .reg .b64 lo, hi; .reg .b128 word;\n ld.relaxed.sys.global.b128 word, [%4];\n mov.b128 {lo, hi}, word;\n"
        " mov.b64 {%0, %1}, lo;\n mov.b64 {%2, %3}, hi; }"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(from)
        : "memory");
    return v;
}

// The same for one number.
__device__ __forceinline__ void store_number(void* to, int number, u32 epoch) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"((u64)epoch << 32 | (u32)number) : "memory");
}

__device__ __forceinline__ u64 load_number(const void* from) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ bool is_of(u64 number, u32 epoch) { return number >> 32 == epoch; }

// Not bar.sync: lanes that have waited for different things may come apart, and that counts such a warp more than once.
__device__ __forceinline__ void sync_threads(int barrier, int threads) {
    asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void arrive_threads(int barrier, int threads) {
    asm volatile("barrier.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Waits while missing() names a rank, or until the deadline; from then on every wait of this launch counts as satisfied.
template <class Missing>
__device__ __forceinline__ void wait_while(State* state, u64 deadline, u32 phase, Missing missing) {
    int peer;
    for (u32 polls = 1; (peer = missing()) >= 0; ++polls) {
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

// Lane 0 holds the ticket: it is on its way until the warp asks for it.
__device__ __forceinline__ u32 draw(Counter& counter) { return lane_id() == 0 ? atomicAdd(&counter.value, 1) : 0; }

__device__ __forceinline__ int ticket(u32 drawn) { return __shfl_sync(~0u, drawn, 0); }

// By one thread of each of the `groups` of a block, once it needs no more tickets: the last of all makes the launch
// count and hands the tickets back. Copies may still be under way then; the end of the kernel waits for those.
__device__ __forceinline__ void leave(State* state, u32* left, u32 groups, u32 epoch) {
    if (atomicAdd(left, 1) != groups - 1) return;
    if (atomicAdd(&state->finished.value, 1) != gridDim.x - 1) return;
    state->finished.value = 0;
    for (int i = 0; i < 4; ++i) state->tickets[i].value = 0;
    state->epoch = epoch;
}

__device__ __forceinline__ void store_row(Vector* p, Vector v) {
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

}  // namespace moeloom
