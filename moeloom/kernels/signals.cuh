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
    u32 aborted;          // why a wait gave up, TIMED_OUT or STOPPED; the host sets it to 0 again
    u32 phase;            // what the first to give up waited for
    u32 peer;             // for whom
    u32* failure;         // [4], null: none. aborted, phase, peer and epoch, for a host that looks without waiting
    const u32* stop;      // null: none. A peer that takes no part writes the first epoch in which it does not
    u32 wrong_ids;        // epoch of the last launch that met a wrong id
    Counter finished;     // blocks that have drawn their last ticket in this launch
    Counter tickets[4];   // work handed out in this launch, by role
};

constexpr u32 TIMED_OUT = 1, STOPPED = 2;
constexpr u32 LAST_EPOCH = 0x7fffffff;  // odd, as banks alternate; combine keeps a bit beside it

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

// Whether to wait no longer. The first to say so notes for what: the failure's first word last, as the host looks at it.
__device__ __forceinline__ bool gives_up(State* state, u64 deadline, u32 phase, u32 peer, bool heeds_stop) {
    if (*(volatile u32*)&state->aborted) return true;
    const u32 epoch = state->epoch + 1;
    const bool stopped = heeds_stop && state->stop && *(volatile const u32*)state->stop >= epoch;
    if (!stopped && nanoseconds() <= deadline) return false;
    const u32 why = stopped ? STOPPED : TIMED_OUT;
    if (atomicCAS(&state->aborted, 0, why)) return true;
    state->phase = phase;
    state->peer = peer;
    if (volatile u32* failure = state->failure) {
        failure[1] = phase;
        failure[2] = peer;
        failure[3] = epoch;
        __threadfence_system();
        failure[0] = why;
    }
    return true;
}

// Waits while missing() names a rank, until the deadline or a peer's stop; from then on every wait counts as satisfied.
// heeds_stop: false where another wait knows better which peer is missing, and gives up for both.
template <class Missing>
__device__ __forceinline__ void wait_while(State* state, u64 deadline, u32 phase, Missing missing, bool heeds_stop = true) {
    int peer;
    for (u32 polls = 1; (peer = missing()) >= 0; ++polls)
        if (polls % 256 == 0 && gives_up(state, deadline, phase, peer, heeds_stop)) return;
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
    state->epoch = epoch == LAST_EPOCH ? 1 : epoch;
}

__device__ __forceinline__ void store_row(Vector* p, Vector v) {
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

}  // namespace moeloom
