// wgmma on operands in shared memory (sm_90a). tma_pipeline.cuh and packed_halves.cuh precede this file.

#define D4(n) "+f"(d[n]), "+f"(d[n + 1]), "+f"(d[n + 2]), "+f"(d[n + 3])
#define D16(n) D4(n), D4(n + 4), D4(n + 8), D4(n + 12)
// 64 x 128 sums += (or =) 64 x 16 · 16 x 128.
template <bool A_MN_MAJOR, bool B_MN_MAJOR> INLINE void wgmma(float* d, u64 a, u64 b, int add) {
    asm volatile("{.reg .pred add; setp.ne.b32 add, %66, 0; "
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
                 "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, "
                 "%41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, "
                 "%60, %61, %62, %63}, %64, %65, add, 1, 1, %67, %68;}"
                 : D16(0), D16(16), D16(32), D16(48)
                 : "l"(a), "l"(b), "r"(add), "n"(A_MN_MAJOR ? 1 : 0), "n"(B_MN_MAJOR ? 1 : 0));
}
INLINE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> INLINE void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// Keeps the compiler from moving uses of sums across a wait.
template <int N> INLINE void fence_sums(float* d) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}
