// The memory layout of quantised weights: one layout for VNNI, AVX2, portable and GPU kernels.
//
// A matrix [N, K] (y = W x) is cut into row blocks of 16 rows, and those into tiles of 64 columns.
// A tile has two groups of 32 columns. Missing rows and columns are padded with zeros.
//
//   matrix     row block 0 | row block 1 | ...             ceil(N / 16) of them
//   row block  tile 0 | tile 1 | ...                       ceil(K / 64) of them
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
//   mxfp4 tile, 544 bytes                                  4.25 bits per weight
//     0     codes as in q4, each a number of OCP's E2M1 (Microscaling Formats 1.0, section 5.3.3):
//           a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6
//     512   scales:  group 0, row 0 … 15;  group 1, row 0 … 15      E8M0: byte e means 2^(e − 127)
//
//   weight = scale · (code − zero),  zero = 8 in q4 (codes 0 … 15), 128 in q8 (codes 0 … 255)
//
// mxfp4 has the values of the checkpoint, sorted into tiles: nothing is rounded. Its kernels look
// codes up: twice a code's value is an integer, and adding 12 makes it unsigned. So below, a code
// is 0 … 24, zero is 12, and s contains a factor of 1/2. e = 255, NaN in E8M0, is infinity here.
//
// Reasons: 16 rows of one word are a 64-byte vector whose 32-bit lanes are rows. It is multiplied
// with one 32-bit word of the activation, the same for all lanes. So `vpdpbusd` with a broadcast
// operand needs no shuffle and no horizontal sum. AVX2 takes each vector as two halves of 8 rows.
// On a GPU 16 × v neighbouring threads read neighbouring words. Codes are unsigned because
// `vpdpbusd` and `vpmaddubsw` take unsigned weights; the sum starts at `− zero · Σ a`. Scales lie
// in the tile, so that a matrix is one stream for the prefetcher. A q4 or q8 tile is whole cache
// lines.
//
// Canonical arithmetic, the same bits on every path, for any number of rows per call:
//
//   activation   per group: s = max|a| / 127, q = round(a · (127 / max|a|)) to even; f32
//   group        d = Σ_k q_k · code_k − zero · Σ_k q_k                       exact integer
//   output       y = fma(float(d), scale · s, y) over groups 0, 1, …         f32, from 0
//
// |d| ≤ 32 · 127 · 128 < 2^24, so float(d) is exact.
#pragma once

#include <cstddef>

namespace moeinf {

inline constexpr std::size_t kBlockRows = 16;
inline constexpr std::size_t kGroup = 32;
inline constexpr std::size_t kTileColumns = 64;
inline constexpr std::size_t kTileGroups = kTileColumns / kGroup;
inline constexpr std::size_t kQ4TileBytes = 576;
inline constexpr std::size_t kQ8TileBytes = 1088;
inline constexpr std::size_t kMxfp4TileBytes = 544;
inline constexpr int kQ4Zero = 8;
inline constexpr int kQ8Zero = 128;
inline constexpr int kMxfp4Zero = 12;

// 2 · E2M1 + kMxfp4Zero, by code: codes 8 … 15 have negative values.
inline constexpr unsigned char kMxfp4Codes[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                  12, 11, 10, 9,  8,  6,  4,  0};
inline constexpr int kLeastE8M0 = 0x00400000;  // bits of 2^-127: for e = 0, e << 23 would be 0.0

static_assert(kQ4TileBytes == kBlockRows * (kTileColumns / 2 + 2 * kTileGroups));
static_assert(kQ8TileBytes == kBlockRows * (kTileColumns + 2 * kTileGroups));
static_assert(kMxfp4TileBytes == kBlockRows * (kTileColumns / 2 + kTileGroups));
static_assert(kQ4TileBytes % 64 == 0 && kQ8TileBytes % 64 == 0, "a tile is whole cache lines");

enum class Format { kBf16, kQ8, kQ4, kMxfp4 };  // kBf16 is row-major, as in a checkpoint

constexpr std::size_t ceil_div(std::size_t count, std::size_t unit) {
    return (count + unit - 1) / unit;
}

constexpr std::size_t tile_bytes(Format format) {
    if (format == Format::kMxfp4) return kMxfp4TileBytes;
    return format == Format::kQ4 ? kQ4TileBytes : kQ8TileBytes;
}

constexpr int zero_of(Format format) {
    if (format == Format::kMxfp4) return kMxfp4Zero;
    return format == Format::kQ4 ? kQ4Zero : kQ8Zero;
}

// Returns the bytes of one row block of a quantised matrix with `columns` columns.
constexpr std::size_t block_bytes(Format format, std::size_t columns) {
    return ceil_div(columns, kTileColumns) * tile_bytes(format);
}

constexpr std::size_t matrix_bytes(Format format, std::size_t rows, std::size_t columns) {
    if (format == Format::kBf16) return rows * columns * 2;
    return ceil_div(rows, kBlockRows) * block_bytes(format, columns);
}

}  // namespace moeinf
