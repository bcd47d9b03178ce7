// The memory layout of quantised weights: one layout for VNNI, AVX2, portable and GPU kernels.
//
// A matrix [N, K] (y = W x) is cut into row blocks of 16 rows, and those into tiles of C columns.
// C is 64, or 256 in q4k, q5k and q6k. Missing rows and columns are padded with zeros.
//
//   matrix     row block 0 | row block 1 | ...             ceil(N / 16) of them
//   row block  tile 0 | tile 1 | ...                       ceil(K / C) of them
//
// A tile of q8, q4, q3, q2 and mxfp4 has two groups of 32 columns:
//
//   q8 tile, 1088 bytes = 17 cache lines                   8.5 bits per weight
//     0     codes of group 0:  word v = 0 … 7, row r = 0 … 15:  4 bytes, k = 4v … 4v+3
//     512   codes of group 1
//     1024  scales:  group 0, row 0 … 15;  group 1, row 0 … 15      float16
//
//   q4 tile, 576 bytes = 9 cache lines                     4.5 bits per weight
//     0     codes of group 0:  word v = 0 … 3, row r = 0 … 15:  4 bytes b = 0 … 3,
//                              low nibble k = 4v + b, high nibble k = 16 + 4v + b
//     256   codes of group 1
//     512   scales as above
//
//   q3 tile, 448 bytes = 7 cache lines                     3.5 bits per weight
//     0     group 0, words w = 0 … 2, row r = 0 … 15, 4 bytes b:
//             w = 0, 1   bits 0 and 1 of the code of k = 4 (2i + w) + b at bits 2i and 2i + 1
//             w = 2      bit 2 of the code of k = 4v + b at bit v
//     192   group 1
//     384   scales as above
//
//   q2 tile, 320 bytes = 5 cache lines                     2.5 bits per weight
//     0     group 0, words w = 0, 1 as in q3
//     128   group 1
//     256   scales as above
//
//   mxfp4 tile, 544 bytes                                  4.25 bits per weight
//     0     codes as in q4, each a number of OCP's E2M1 (Microscaling Formats 1.0, section 5.3.3):
//           a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6
//     512   scales:  group 0, row 0 … 15;  group 1, row 0 … 15      E8M0: byte e means 2^(e − 127)
//
//   weight = scale · (code − zero),  zero = 8 in q4 (codes 0 … 15), 128 in q8 (codes 0 … 255)
//          = scale · (2 · code − zero)    zero = 7 in q3 (codes 0 … 7), 3 in q2 (codes 0 … 3)
//
// So weights of q3 and q2 are odd multiples of the scale, as many above 0 as below. Their kernels
// double the codes while they unpack them. Below, a code is the doubled one.
//
// mxfp4 has the values of the checkpoint, sorted into tiles: nothing is rounded. Its kernels look
// codes up: twice a code's value is an integer, and adding 12 makes it unsigned. So below, a code
// is 0 … 24, zero is 12, and s contains a factor of 1/2. e = 255, NaN in E8M0, is infinity here.
//
// Tiles of q4k, q5k, q6k and nvfp4 are blocks of a GGUF file. A block has C weights of one row. The
// 16 blocks of a tile are interleaved by 32-bit words: word w of row r is at 64 w + 4 r. No bit of
// them changes, so a tile has the values and the size of its blocks. Words of a block:
//
//   q4k tile, 2304 bytes                                   4.5 bits per weight
//     0         float16 d, float16 dmin
//     1 … 3     A, B, C: 6-bit scales s and minima m of groups 0 … 7, in bytes j = 0 … 3:
//               A_j = s_j + 64 (s_(4+j) >> 4),  B_j = m_j + 64 (m_(4+j) >> 4),
//               C_j = (s_(4+j) & 15) + 16 (m_(4+j) & 15)
//     4 … 35    word 4 + 8 j + v:  4 bytes b, k = 4v + b,  low nibble group 2j, high nibble 2j + 1
//
//   q5k tile, 2816 bytes                                   5.5 bits per weight
//     0 … 3     as in q4k
//     4 … 11    word 4 + v:  bit g of byte b is bit 4 of the code of group g, k = 4v + b
//     12 … 43   as words 4 … 35 of q4k: bits 0 … 3 of the codes
//
//   q6k tile, 3360 bytes                                   6.5625 bits per weight
//     0 … 31    bits 0 … 3 of group g = 4h + i, k = 4v + b:
//               word 16 h + 8 (i & 1) + v, low nibble where i < 2
//     32 … 47   bits 4 and 5 of it:  word 32 + 8 h + v, bits 2i and 2i + 1 of byte b
//     48 … 51   int8 scales of half groups:  byte 2 (g & 1) + (k >> 4) of word 48 + g / 2
//     3328      d of row 0 … 15, float16
//
//   nvfp4 tile, 576 bytes                                  4.5 bits per weight, and 4 bytes a row
//     0         scales of half groups 0 … 3, E4M3 without sign: byte e means the float16 with the
//               bits e << 7, times 2^8. So 0x7F, NaN in E4M3, means 480. Bit 7 is 0.
//     1 … 8     word 1 + 2h + v of half group h:  codes of E2M1, low nibble k = 4v + b, high
//               nibble k = 8 + 4v + b
//   A row block of nvfp4 starts with 64 bytes: a factor of row 0 … 15, float32.
//
//   weight = (d · s) · code − (dmin · m)                   q4k, q5k     in float32; the products
//          = (d · scale) · (code − 32)                     q6k          are exact
//          = factor · (scale · E2M1(code))                 nvfp4
//
// The kernels look up codes of nvfp4 as those of mxfp4, so its zero is 12.
//
// Reasons: 16 rows of one word are a 64-byte vector whose 32-bit lanes are rows. It is multiplied
// with one 32-bit word of the activation, the same for all lanes. So `vpdpbusd` with a broadcast
// operand needs no shuffle and no horizontal sum. AVX2 takes each vector as two halves of 8 rows.
// On a GPU 16 × v neighbouring threads read neighbouring words. Codes are unsigned because
// `vpdpbusd` and `vpmaddubsw` take unsigned weights; the sum starts at `− zero · Σ a`. Scales lie
// in the tile, so that a matrix is one stream for the prefetcher. A tile is whole cache lines, but
// for mxfp4 and q6k, where every second tile starts in the middle of one. Matrices that follow them
// do, too.
//
// Canonical arithmetic, the same bits on every path, for any number of rows per call:
//
//   activation   per group: s = max|a| / 127, q = round(a · (127 / max|a|)) to even; f32
//   group        d = Σ_k q_k · code_k − zero · Σ_k q_k                       exact integer
//   output       y = fma(float(d), scale · s, y) over groups 0, 1, …         f32, from 0
//
// |d| ≤ 32 · 127 · 128 < 2^24, so float(d) is exact. The formats of interleaved blocks have two
// sums and two scales in a group. Their products with d and dmin are exact, see above:
//
//   q4k, q5k     d = Σ_k q_k · code_k,  a = −Σ_k q_k
//                t = fma(float(d), D · s, float(a) · (dmin · m))             D is the block's d
//   q6k, nvfp4   d_h = Σ_k q_k · code_k − zero · Σ_k q_k over half group h = 0, 1
//                t = fma(float(d_1), S_1, float(d_0) · S_0)         S_h = D · scale_h, or scale_h
//   output       y = fma(t, s, y) over groups 0, 1, …;  nvfp4: then y · factor
#pragma once

#include <cstddef>

namespace moeinf {

inline constexpr std::size_t kBlockRows = 16;
inline constexpr std::size_t kGroup = 32;
inline constexpr std::size_t kTileColumns = 64;
inline constexpr std::size_t kTileGroups = kTileColumns / kGroup;
inline constexpr std::size_t kQ4TileBytes = 576;
inline constexpr std::size_t kQ8TileBytes = 1088;
inline constexpr std::size_t kQ3TileBytes = 448;
inline constexpr std::size_t kQ2TileBytes = 320;
inline constexpr std::size_t kMxfp4TileBytes = 544;
inline constexpr std::size_t kQ4kTileBytes = 2304;
inline constexpr std::size_t kQ5kTileBytes = 2816;
inline constexpr std::size_t kQ6kTileBytes = 3360;
inline constexpr std::size_t kNvfp4TileBytes = 576;
inline constexpr int kQ4Zero = 8;
inline constexpr int kQ8Zero = 128;
inline constexpr int kQ3Zero = 7;
inline constexpr int kQ2Zero = 3;
inline constexpr int kMxfp4Zero = 12;
inline constexpr int kQ6kZero = 32;

// 2 · E2M1 + kMxfp4Zero, by code: codes 8 … 15 have negative values.
inline constexpr unsigned char kMxfp4Codes[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                  12, 11, 10, 9,  8,  6,  4,  0};
inline constexpr int kLeastE8M0 = 0x00400000;  // bits of 2^-127: for e = 0, e << 23 would be 0.0

enum class Format {
    kBf16,  // row-major, as in a checkpoint
    kQ8,
    kQ4,
    kQ3,
    kQ2,
    kMxfp4,
    kQ4k,
    kQ5k,
    kQ6k,
    kNvfp4,
};

constexpr std::size_t ceil_div(std::size_t count, std::size_t unit) {
    return (count + unit - 1) / unit;
}

// Returns true if two half groups of 16 have a scale each.
constexpr bool has_half_groups(Format format) {
    return format == Format::kQ6k || format == Format::kNvfp4;
}

// Returns true if a group has a minimum, which is subtracted.
constexpr bool has_minima(Format format) {
    return format == Format::kQ4k || format == Format::kQ5k;
}

// Returns true if tiles are interleaved blocks of a GGUF file.
constexpr bool is_interleaved(Format format) {
    return has_half_groups(format) || has_minima(format);
}

// Returns true if weights are odd multiples of the scale.
constexpr bool is_odd(Format format) {
    return format == Format::kQ3 || format == Format::kQ2;
}

// Returns true if codes are numbers of E2M1.
constexpr bool is_e2m1(Format format) {
    return format == Format::kMxfp4 || format == Format::kNvfp4;
}

constexpr std::size_t tile_columns(Format format) {
    return has_minima(format) || format == Format::kQ6k ? 256 : kTileColumns;
}

constexpr std::size_t tile_bytes(Format format) {
    switch (format) {
        case Format::kQ4: return kQ4TileBytes;
        case Format::kQ3: return kQ3TileBytes;
        case Format::kQ2: return kQ2TileBytes;
        case Format::kMxfp4: return kMxfp4TileBytes;
        case Format::kQ4k: return kQ4kTileBytes;
        case Format::kQ5k: return kQ5kTileBytes;
        case Format::kQ6k: return kQ6kTileBytes;
        case Format::kNvfp4: return kNvfp4TileBytes;
        default: return kQ8TileBytes;
    }
}

constexpr int zero_of(Format format) {
    if (is_e2m1(format)) return kMxfp4Zero;
    if (format == Format::kQ6k) return kQ6kZero;
    if (format == Format::kQ3) return kQ3Zero;
    if (format == Format::kQ2) return kQ2Zero;
    return format == Format::kQ4 ? kQ4Zero : kQ8Zero;
}

// Returns the bytes of a scale in a tile of q8, q4, q3, q2 or mxfp4.
constexpr std::size_t scale_bytes(Format format) {
    return format == Format::kMxfp4 ? 1 : 2;
}

// Returns the bytes of a group's codes in such a tile; scales follow the codes of the last group.
constexpr std::size_t code_bytes(Format format) {
    return tile_bytes(format) / kTileGroups - scale_bytes(format) * kBlockRows;
}

// Returns the bytes of factors with which a row block starts.
constexpr std::size_t factor_bytes(Format format) {
    return format == Format::kNvfp4 ? kBlockRows * sizeof(float) : 0;
}

constexpr std::size_t tiles_of(Format format, std::size_t columns) {
    return ceil_div(columns, tile_columns(format));
}

// Returns the bytes of one row block of a quantised matrix with `columns` columns.
constexpr std::size_t block_bytes(Format format, std::size_t columns) {
    return factor_bytes(format) + tiles_of(format, columns) * tile_bytes(format);
}

static_assert(kQ4TileBytes == kBlockRows * (kTileColumns / 2 + 2 * kTileGroups));
static_assert(kQ8TileBytes == kBlockRows * (kTileColumns + 2 * kTileGroups));
static_assert(kQ3TileBytes == kBlockRows * (kTileColumns * 3 / 8 + 2 * kTileGroups));
static_assert(kQ2TileBytes == kBlockRows * (kTileColumns / 4 + 2 * kTileGroups));
static_assert(kMxfp4TileBytes == kBlockRows * (kTileColumns / 2 + kTileGroups));
static_assert(kQ4kTileBytes == kBlockRows * 4 * 36 && kQ5kTileBytes == kBlockRows * 4 * 44);
static_assert(kQ6kTileBytes == kBlockRows * (4 * 52 + 2) && kNvfp4TileBytes == kBlockRows * 4 * 9);

constexpr std::size_t matrix_bytes(Format format, std::size_t rows, std::size_t columns) {
    if (format == Format::kBf16) return rows * columns * 2;
    return ceil_div(rows, kBlockRows) * block_bytes(format, columns);
}

}  // namespace moeinf
