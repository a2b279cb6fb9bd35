// Masks and dropout of the attention kernels. attention_common.cuh precedes this file; PASS is 0 for the output, 1
// for the gradient of the queries, 2 for those of keys and values.

#if MASK_STAGES
// A tile of the mask in shared memory has the rows of 64 queries and 64 keys. Its panels have 128 bytes a row and
// the swizzle of other tiles.
#define MASK_PANEL_KEYS (MASK == 2 ? 32 : 64)
#define MASK_TILE_BYTES (64 / MASK_PANEL_KEYS * 64 * 128)
static_assert(HOPPER && MASK >= 2 && ROWS == 64 && COLS == 64, "boxes of the mask have 64 rows and 64 columns");

INLINE u32 mask_stage(u32 tiles, int t) { return tiles + t % MASK_STAGES * MASK_TILE_BYTES; }

// Loads the mask's tile `t` with the other tiles of its stage, if `issues` is true. Elements outside of the mask
// become zero. A single tile is loaded when all warps have read the one before, and else with its stage.
INLINE void load_mask_tile(bool issues, u32 tiles, const Params& p, int batch, int head, int query, int key, int t) {
    // The map of a mask that heads or batches share has one of them.
    head = p.mask_head ? head : 0, batch = p.mask_batch ? batch : 0;
#pragma unroll
    for (int first = 0; first < 64; first += MASK_PANEL_KEYS)
        load_stage_box_if(issues, mask_stage(tiles, t) + first / MASK_PANEL_KEYS * (64 * 128), &p.mask_map,
            key + first, query, head, batch, t);
}
#else
#define MASK_TILE_BYTES 0
#endif

// Mask values and dropout bits of a tile of scores. They are loaded and generated while the products run,
// without a branch.
struct TileMasks {
#if MASK == 1
    // Bit 4 n + i is set if the query attends to the key of element [m][n][i] of the scores.
    u32 visible[ROWS16];
#elif MASK
    Accumulators<COLS> bias;
#endif
#if DROPOUT
    u32 keep_bits[ROWS16][PASS == 2 ? 8 : 4];
#endif
};

#if MASK == 1
typedef unsigned char MaskElement;
typedef u32 MaskValue;
INLINE u32 load_mask_element(const MaskElement* at) {
    u32 word;
    asm("ld.global.nc.u8 %0, [%1];" : "=r"(word) : "l"(at));
    return word;
}
#elif MASK == 2
typedef float MaskElement;
typedef float MaskValue;
INLINE float load_mask_element(const MaskElement* at) {
    float value;
    asm("ld.global.nc.f32 %0, [%1];" : "=f"(value) : "l"(at));
    return value;
}
#elif MASK == 3
typedef u16 MaskElement;
typedef float MaskValue;
INLINE float load_mask_element(const MaskElement* at) {
    u16 value;
    asm("ld.global.nc.u16 %0, [%1];" : "=h"(value) : "l"(at));
    return low_half(value);
}
#endif

#if MASK && !MASK_STAGES
INLINE const MaskElement* head_mask(const Params& p, int batch, int head) {
    return static_cast<const MaskElement*>(p.mask) + batch * p.mask_batch + head * p.mask_head;
}

#if MASK_PAIRS
// Reads two neighbours in a row of the mask.
INLINE void load_mask_pair(const MaskElement* at, MaskValue (&pair)[2]) {
#if MASK == 1
    u16 both;
    asm("ld.global.nc.u16 %0, [%1];" : "=h"(both) : "l"(at));
    pair[0] = both & 0xff, pair[1] = both >> 8;
#elif MASK == 2
    asm("ld.global.nc.v2.f32 {%0, %1}, [%2];" : "=f"(pair[0]), "=f"(pair[1]) : "l"(at));
#else
    u32 both;
    asm("ld.global.nc.u32 %0, [%1];" : "=r"(both) : "l"(at));
    pair[0] = low_half(both), pair[1] = high_half(both);
#endif
}
#endif

// Reads the mask of a tile. Indices past the ends are clamped.
INLINE void load_mask(TileMasks& masks, const MaskElement* mask, int row, int column, u32 row_step, u32 column_step,
                      int rows, int columns) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int m = 0; m < ROWS16; m++) {
#if MASK == 1
        masks.visible[m] = 0;
#endif
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const MaskElement* line = mask + (i64)min(row + 16 * m + 8 * half + (lane >> 2), rows - 1) * row_step;
#pragma unroll
            for (int n = 0; n < COLS / 8; n++) {
                const int first = column + 8 * n + 2 * (lane & 3);
                MaskValue pair[2];
#if MASK_PAIRS
                load_mask_pair(line + min(first, columns - 2), pair);
#else
#pragma unroll
                for (int k = 0; k < 2; k++)
                    pair[k] = load_mask_element(line + (u32)min(first + k, columns - 1) * column_step);
#endif
#pragma unroll
                for (int k = 0; k < 2; k++) {
#if MASK == 1
                    masks.visible[m] |= (pair[k] != 0) << (4 * n + 2 * half + k);
#else
                    masks.bias.v[m][n][2 * half + k] = pair[k];
#endif
                }
            }
        }
    }
}
#endif

#if MASK_STAGES
// Reads the mask of this warp's scores from a tile in shared memory.
INLINE void read_mask_tile(TileMasks& masks, u32 tile) {
    Accumulators<COLS>& bias = masks.bias;
    const int lane = threadIdx.x & 31, row = warp_row();
#if MASK == 3
#pragma unroll
    for (int n = 0; n < COLS / 8; n += 2) {
        u32 r[4];
#if PASS == 2
        // Rows of the tile are columns of the scores.
        ldmatrix_x4_trans(r, tile_address<64>(tile, 8 * n + (lane & 7) + (lane >> 4) * 8,
            row / 8 + ((lane >> 3) & 1)));
#else
        load_a_fragment<64>(r, tile, row, n / 2);
#endif
#pragma unroll
        for (int i = 0; i < 4; i++) {
            bias.v[0][n + i / 2][i % 2 * 2] = low_half(r[i]);
            bias.v[0][n + i / 2][i % 2 * 2 + 1] = high_half(r[i]);
        }
    }
#elif PASS == 2
    // Queries 8 n + 2 (lane % 4) + k, keys row + 8 half + lane / 4: four keys in each part of 16 bytes.
    const int key = row + (lane >> 2), query = 2 * (lane & 3);
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const u32 at = tile_address<64>(tile, query + k, (key + 8 * half) >> 2) + (key & 3) * 4;
#pragma unroll
            for (int n = 0; n < COLS / 8; n++)
                asm volatile("ld.shared.f32 %0, [%1];" : "=f"(bias.v[0][n][2 * half + k]) : "r"(at + n * 1024)
                             : "memory");
        }
#else
    // Queries row + 8 half + lane / 4, keys 8 n + 2 (lane % 4) and the next.
#pragma unroll
    for (int n = 0; n < COLS / 8; n++) {
        const u32 at = tile_address<64>(tile, row + (lane >> 2), 2 * n + ((lane >> 1) & 1)) + (lane & 1) * 8;
#pragma unroll
        for (int half = 0; half < 2; half++)
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                         : "=f"(bias.v[0][n][2 * half]), "=f"(bias.v[0][n][2 * half + 1]) : "r"(at + half * 1024)
                         : "memory");
    }
#endif
}
#endif

// Factor of scores, after `apply_mask`, for exponents of two. Additive masks need scaled scores.
INLINE float score_scale(const Params& p) { return MASK >= 2 ? LOG2E : p.scale * LOG2E; }

// Applies the mask to scores. With an additive mask it scales them first.
INLINE void apply_mask(Accumulators<COLS>& s, const TileMasks& masks, const Params& p) {
#if MASK
#pragma unroll
    for (int m = 0; m < ROWS16; m++)
#pragma unroll
        for (int n = 0; n < COLS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
#if MASK == 1
                if (!(masks.visible[m] >> (4 * n + i) & 1)) s.v[m][n][i] = NEG_INFINITY;
#else
                s.v[m][n][i] = s.v[m][n][i] * p.scale + masks.bias.v[m][n][i];
#endif
            }
#endif
}

// Returns what is subtracted from exponents for a maximum or log-sum-exp of scores after `apply_mask`. The
// lowest floats are common in additive masks, and infinite as exponents of two: their differences are not.
INLINE float score_offset(float score, float scale) { return MASK >= 2 ? score : score * scale; }
INLINE float score_exponent(float score, float offset, float scale) {
    return MASK >= 2 ? (score - offset) * scale : score * scale - offset;
}

// Weight of a score from the log-sum-exp of its query.
INLINE float softmax_weight(float score, float lse, float scale) {
    // With the largest values of a mask, rounding of the sum exceeds the differences of scores.
    return exp2_fast(MASK >= 2 ? fminf(score - lse, 0.0f) * scale : score * scale - lse);
}

#if DROPOUT
// Philox 4x32-10, like `math/philox.wgsl`.
INLINE uint4 philox(u32 x, u32 y, u32 z, u32 w, u32 key0, u32 key1) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u64 a = (u64)0xd2511f53u * x, b = (u64)0xcd9e8d57u * z;
        x = (u32)(b >> 32) ^ y ^ key0;
        y = (u32)b;
        z = (u32)(a >> 32) ^ w ^ key1;
        w = (u32)a;
        key0 += 0x9e3779b9u;
        key1 += 0xbb67ae85u;
    }
    return {x, y, z, w};
}

// Returns a bit for each of eight keys that share one Philox block; a set bit keeps the weight.
INLINE u32 dropout_bits(u32 query, int key, const uint4& random, u32 threshold) {
    uint4 drawn = philox(random.x, random.y, query, (u32)key >> 3, random.z, random.w);
    u32 words[4] = {drawn.x, drawn.y, drawn.z, drawn.w}, bits = 0;
#pragma unroll
    for (int i = 0; i < 4; i++)
        bits |= ((words[i] & 0xffff) >= threshold) << (2 * i) | ((words[i] >> 16) >= threshold) << (2 * i + 1);
    return bits;
}

// Generates dropout bits for a tile of queries and keys; `query` is the index of the first query over all heads.
// Threads that share Philox blocks take turns to generate them.
INLINE void draw_dropout_bits(TileMasks& masks, const uint4& random, u32 threshold, u32 query, int key) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int m = 0; m < ROWS16; m++) {
        u32 bits = 0;
#if PASS == 2
        // Rows are keys: the eight threads of a column share blocks.
#pragma unroll
        for (int draw = 0; draw < COLS / 16; draw++) {
            int block = 8 * draw + (lane >> 2), n = block % (COLS / 8), half = block / (COLS / 8) % 2,
                k = block / (COLS / 4);
            bits |= dropout_bits(query + 8 * n + 2 * (lane & 3) + k, key + 16 * m + 8 * half, random, threshold)
                << (8 * draw);
        }
#pragma unroll
        for (int i = 0; i < 8; i++)
            masks.keep_bits[m][i] = __shfl_sync(0xffffffff, bits, 4 * i + (lane & 3)) >> (lane >> 2);
#else
        // Rows are queries: the four threads of a row share blocks.
#pragma unroll
        for (int draw = 0; draw < COLS / 16; draw++) {
            int block = 4 * draw + (lane & 3), n = block % (COLS / 8), half = block / (COLS / 8);
            bits |= dropout_bits(query + 16 * m + 8 * half + (lane >> 2), key + 8 * n, random, threshold) << (8 * draw);
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            masks.keep_bits[m][i] = __shfl_sync(0xffffffff, bits, (lane & ~3) + i) >> (2 * (lane & 3));
#endif
    }
}
#endif

// Reports whether dropout keeps the weight of element [m][n][i] of the accumulators.
INLINE bool is_kept(const TileMasks& masks, int m, int n, int i) {
#if DROPOUT && PASS == 2
    int block = n + (COLS / 8) * (i / 2) + (COLS / 4) * (i % 2);
    return masks.keep_bits[m][block % 8] >> (block / 8 * 8) & 1;
#elif DROPOUT
    int block = n + (COLS / 8) * (i / 2);
    return masks.keep_bits[m][block % 4] >> (block / 4 * 8 + i % 2) & 1;
#else
    return true;
#endif
}

#if DROPOUT
#define DROPOUT_SCALE(p) ((p).dropout_scale)
INLINE Accumulators<COLS> apply_dropout(const Accumulators<COLS>& s, const TileMasks& masks) {
    Accumulators<COLS> kept;
#pragma unroll
    for (int m = 0; m < ROWS16; m++)
#pragma unroll
        for (int n = 0; n < COLS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) kept.v[m][n][i] = is_kept(masks, m, n, i) ? s.v[m][n][i] : 0.0f;
    return kept;
}
#else
#define DROPOUT_SCALE(p) 1.0f
INLINE const Accumulators<COLS>& apply_dropout(const Accumulators<COLS>& s, const TileMasks&) { return s; }
#endif
