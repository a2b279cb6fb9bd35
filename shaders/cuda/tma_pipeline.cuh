// Stages of shared memory that TMA fills and threads consume, with barriers (from sm_90 on).

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

#define INLINE __device__ __forceinline__

// A tensor map, the descriptor of a tensor for TMA.
struct alignas(64) Map {
    u64 words[16];
};

INLINE void init_barrier(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes barriers that this thread has initialised visible to TMA.
INLINE void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// One thread of the block announces the bytes that the stage's barrier counts.
INLINE void expect_tx(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
INLINE void arrive_barrier(u32 barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
INLINE void wait_barrier(u32 barrier, u32 parity) {
    u32 done;
    do {
        asm volatile("{.reg .pred done; mbarrier.try_wait.parity.shared.b64 done, [%1], %2; selp.u32 %0, 1, 0, done;}"
                     : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    } while (!done);
}
// Loads a box of a tensor of two to five dimensions.
INLINE void load_box(u32 to, const Map& map, int x, int y, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(&map), "r"(x), "r"(y), "r"(barrier) : "memory");
}
INLINE void load_box(u32 to, const Map& map, int x, int y, int z, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];"
                 ::"r"(to), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier) : "memory");
}
INLINE void load_box(u32 to, const Map& map, int x, int y, int z, int w, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5}], [%6];"
                 ::"r"(to), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier) : "memory");
}
INLINE void load_box(u32 to, const Map& map, int x, int y, int z, int w, int v, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];"
                 ::"r"(to), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v), "r"(barrier) : "memory");
}

// Matrix descriptors of wgmma for shared memory. An operand is K-major (its rows or columns are lines of terms
// of the sum) or MN-major (lines of rows or columns). Panels have lines of 128, 64 or 32 bytes, swizzled over
// that span.

// High word of a descriptor for lines of `bytes` bytes: the bytes of eight lines and the swizzle.
#define DESCRIPTOR_HIGH_WORD(bytes) ((bytes) / 2 | ((bytes) == 128 ? 1u : (bytes) == 64 ? 2u : 3u) << 30)
// Low word of a descriptor. `panel` is the distance in bytes of two panels along rows or columns, which only
// MN-major operands use. Steps are added to the word in units of 16 bytes.
INLINE u32 descriptor_low_word(u32 at, u32 panel) { return (at >> 4) + (panel >> 4 << 16); }
template <u32 HIGH = DESCRIPTOR_HIGH_WORD(128)> INLINE u64 make_descriptor(u32 low) {
    u64 all;
    asm("mov.b64 %0, {%1, %2};" : "=l"(all) : "r"(low), "n"(HIGH));
    return all;
}
