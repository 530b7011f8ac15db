// Products by warpgroups: D[64][N] += A[64][32 bytes] * B[N][32 bytes]^T, A and B in shared memory, D in registers.
// A and B are rows of 128 bytes as the copy engine writes them in swizzle mode 128B; D is fp32. Of D, thread t of the
// warpgroup holds rows t / 32 * 16 + t % 32 / 4 and that + 8, columns t % 4 * 2 + 8 i and the next:
// d[4 i .. 4 i + 3] = (row, column), (row, column + 1), (row + 8, column), (row + 8, column + 1).
#pragma once
#include "signals.cuh"

namespace moeloom {

constexpr int WARPGROUP = 128;  // threads

// Of rows of 128 bytes that begin at a multiple of 1024 in shared memory. Further along a row: + bytes / 16.
__device__ __forceinline__ u64 operand(u32 address) {
    return (u64)(address >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most so many of the committed groups are under way.
template <int groups>
__device__ __forceinline__ void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
}

template <int warpgroup_registers>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(warpgroup_registers));
}

template <int warpgroup_registers>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(warpgroup_registers));
}

enum class Values { e4m3, bf16 };

// An instruction's text needs every operand's number.
#define MOELOOM_LIST4 "%0, %1, %2, %3"
#define MOELOOM_LIST8 MOELOOM_LIST4 ", %4, %5, %6, %7"
#define MOELOOM_LIST16 MOELOOM_LIST8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define MOELOOM_LIST32 MOELOOM_LIST16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MOELOOM_LIST64                                                                                             \
    MOELOOM_LIST32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "  \
                   "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MOELOOM_LIST128                                                                                            \
    MOELOOM_LIST64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "  \
                   "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, "    \
                   "%100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, "    \
                   "%115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define MOELOOM_OUT4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MOELOOM_OUT8(d, i) MOELOOM_OUT4(d, i), MOELOOM_OUT4(d, i + 4)
#define MOELOOM_OUT16(d, i) MOELOOM_OUT8(d, i), MOELOOM_OUT8(d, i + 8)
#define MOELOOM_OUT32(d, i) MOELOOM_OUT16(d, i), MOELOOM_OUT16(d, i + 16)
#define MOELOOM_OUT64(d, i) MOELOOM_OUT32(d, i), MOELOOM_OUT32(d, i + 32)
#define MOELOOM_OUT128(d, i) MOELOOM_OUT64(d, i), MOELOOM_OUT64(d, i + 64)

// The three operands behind the list are numbered count, count + 1, count + 2.
#define MOELOOM_MULTIPLY(count, columns, a_number, b_number, keep_number)                                           \
    template <Values values>                                                                                       \
    __device__ __forceinline__ void multiply(float (&d)[count], u64 a, u64 b, int keep) {                            \
        if constexpr (values == Values::e4m3)                                                                      \
            asm volatile("{ .reg .pred p;\n setp.ne.b32 p, %" keep_number ", 0;\n"                                   \
                         " wgmma.mma_async.sync.aligned.m64n" columns "k32.f32.e4m3.e4m3 {" MOELOOM_LIST##count       \
                         "}, %" a_number ", %" b_number ", p, 1, 1; }"                                               \
                         : MOELOOM_OUT##count(d, 0)                                                                 \
                         : "l"(a), "l"(b), "r"(keep));                                                             \
        else                                                                                                       \
            asm volatile("{ .reg .pred p;\n setp.ne.b32 p, %" keep_number ", 0;\n"                                   \
                         " wgmma.mma_async.sync.aligned.m64n" columns "k16.f32.bf16.bf16 {" MOELOOM_LIST##count       \
                         "}, %" a_number ", %" b_number ", p, 1, 1, 0, 0; }"                                         \
                         : MOELOOM_OUT##count(d, 0)                                                                 \
                         : "l"(a), "l"(b), "r"(keep));                                                             \
    }

// keep = 0: D = A * B
MOELOOM_MULTIPLY(4, "8", "4", "5", "6")
MOELOOM_MULTIPLY(8, "16", "8", "9", "10")
MOELOOM_MULTIPLY(16, "32", "16", "17", "18")
MOELOOM_MULTIPLY(32, "64", "32", "33", "34")
MOELOOM_MULTIPLY(64, "128", "64", "65", "66")
MOELOOM_MULTIPLY(128, "256", "128", "129", "130")

// A in registers: 16 rows of each warp, 32 bytes of each. keep = 0: D = A * B
__device__ __forceinline__ void multiply_held(float (&d)[32], const u32 (&a)[4], u64 b, int keep) {
    asm volatile("{ .reg .pred p;\n setp.ne.b32 p, %37, 0;\n"
                 " wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" MOELOOM_LIST32
                 "}, {%32, %33, %34, %35}, %36, p, 1, 1; }"
                 : MOELOOM_OUT32(d, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}

// 32 bytes of 16 rows of 128 bytes, swizzled, as operand A. first: address of the first row; piece: which 32 bytes.
__device__ __forceinline__ void hold_rows(u32 (&a)[4], u32 first, int piece) {
    const u32 lane = lane_id(), row = lane % 16, chunk = 2 * piece + lane / 16;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(first + row * 128 + ((chunk ^ row % 8) << 4))
                 : "memory");
}

// Four of them: all of rows of 128 bytes.
template <Values values, int count>
__device__ __forceinline__ void multiply_rows(float (&d)[count], u64 a, u64 b, int keep) {
#pragma unroll
    for (int i = 0; i < 4; ++i) multiply<values>(d, a + 2 * i, b + 2 * i, keep | i);
}

}  // namespace moeloom
