// The inner loops: one block of weight rows times a few rows of activations, on several paths.
//
// The quantised loops take one row block (16 rows, tiles.h) and `count` rows of activations, 1 to
// kMaxRows, and write out[t][0 … 15]. A path may also have loops for sets of 1 to kSetRows rows, which
// may write all kSetRows rows of out. The bf16 loop takes `rows` ≤ 16 consecutive weight rows of a
// row-major matrix. All paths give the same bits, for any `count`; the result of a row does not
// depend on the other rows. The order of bf16, with 32 partial sums per output:
//
//   e[l] = fma(w[32 i + 2 l], x[32 i + 2 l], e[l])       i = 0, 1, …     l = 0 … 15
//   o[l] = the same for 32 i + 2 l + 1
//   s[l] = e[l] + o[l];  then s[l] += s[l + 8], s[l + 4], s[l + 2], s[l + 1]
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/activations.h"

namespace moeinf {

inline constexpr int kMaxRows = 8;

using QuantLoop = void (*)(const std::byte* block, std::size_t tiles, const QuantGroup* const* x,
                           int count, float (*out)[kBlockRows]) noexcept;
using SetLoop = void (*)(const std::byte* block, std::size_t tiles, const RowSet* x,
                         std::size_t count, float (*out)[kBlockRows]) noexcept;
using Bf16Loop = void (*)(const std::uint16_t* weights, std::size_t columns, std::size_t rows,
                          const SplitGroup* const* x, int count,
                          float (*out)[kBlockRows]) noexcept;

struct Kernels {
    const char* name;
    bool fast;  // false: correct but slow
    QuantLoop q4;
    QuantLoop q8;
    QuantLoop q3;
    QuantLoop q2;
    QuantLoop mxfp4;
    QuantLoop q4k;
    QuantLoop q5k;
    QuantLoop q6k;
    QuantLoop nvfp4;
    Bf16Loop bf16;
    SetLoop (*sets)(Format) noexcept = nullptr;  // null: this path has none; null for bf16
};

extern const Kernels kPortableKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;    // AVX2, FMA, F16C
extern const Kernels kAvx512Kernels;  // AVX-512 F, BW, VL, VNNI
extern const Kernels kAmxKernels;     // these, and AMX for sets of rows
SetLoop amx_loop(Format format) noexcept;
template <Format format>
void interleaved_avx2(const std::byte* block, std::size_t tiles, const QuantGroup* const* x,
                      int count, float (*out)[kBlockRows]) noexcept;
template <Format format>
void interleaved_avx512(const std::byte* block, std::size_t tiles, const QuantGroup* const* x,
                        int count, float (*out)[kBlockRows]) noexcept;
bool has_avx2() noexcept;
bool has_avx512() noexcept;
bool has_amx() noexcept;  // asks the system for the tile registers, once
#elif defined(__aarch64__)
extern const Kernels kNeonKernels;      // NEON with the dot product
extern const Kernels kNeonI8mmKernels;  // these, and the matrix product for sets of rows
SetLoop i8mm_loop(Format format) noexcept;
#endif

float half_to_float(std::uint16_t bits) noexcept;

}  // namespace moeinf
