// Cuts products into pieces for the pool, and keeps the rows between the two rounds.
#include "kernels/expert_ffn.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/rows.h"
#include "platform/cpu.h"
#include "threads/scratch.h"

namespace moeinf {
namespace {

constexpr std::size_t kPieceBlocks = 4;  // row blocks of a piece: some 70 KiB of q4 at K = 2048
constexpr std::size_t kFewRows = 512;    // a matrix of at most this many rows (router) is cut finer
constexpr std::size_t kChunkRows = 64;   // rows of activations per pass over a piece's weights
constexpr std::size_t kRowsWorthThreads = 8;  // from this count, all threads prepare rows
static_assert(kChunkRows % kSetRows == 0);
constexpr std::size_t kRowsAtOnce = 8192;     // of experts, or more for one expert: some 40 MB

constexpr std::size_t item_bytes(Dtype dtype) {
    return dtype == Dtype::kF32 ? 4 : 2;
}

// Fills row i of `rows` with row from(i) of x.
template <class From>
void fill_all(ThreadPool& pool, Rows& rows, const std::byte* x, std::size_t count,
              std::size_t columns, Dtype dtype, From from) {
    const std::size_t stride = columns * item_bytes(dtype);
    const auto fill = [&](std::size_t i) { rows.fill(i, {x + from(i) * stride, dtype}); };
    if (count >= kRowsWorthThreads)
        pool.parallel_for(count, fill);
    else
        for (std::size_t i = 0; i < count; ++i) fill(i);
}

QuantLoop loop_of(const Kernels& kernels, Format format) {
    switch (format) {
        case Format::kQ4: return kernels.q4;
        case Format::kQ3: return kernels.q3;
        case Format::kQ2: return kernels.q2;
        case Format::kMxfp4: return kernels.mxfp4;
        case Format::kQ4k: return kernels.q4k;
        case Format::kQ5k: return kernels.q5k;
        case Format::kQ6k: return kernels.q6k;
        case Format::kNvfp4: return kernels.nvfp4;
        default: return kernels.q8;
    }
}

// Adds the bias of row first + r to out[t][r], for the rows that exist.
void add_bias(const Matrix& matrix, std::size_t first, std::size_t count,
              float (*out)[kBlockRows]) noexcept {
    if (matrix.bias == nullptr) return;
    float bias[kBlockRows];
    const std::size_t there = std::min(kBlockRows, matrix.rows - first);
    for (std::size_t r = 0; r < there; ++r) bias[r] = widen(matrix.bias[first + r]);
    for (std::size_t t = 0; t < count; ++t)
        for (std::size_t r = 0; r < there; ++r) out[t][r] += bias[r];
}

// Multiplies row block `block` of a matrix with `count` rows and adds its bias. Writes zeros for a
// block after the last.
void multiply(const Kernels& kernels, const Matrix& matrix, std::size_t block, Company x,
              std::size_t count, float (*out)[kBlockRows]) noexcept {
    const std::size_t first = block * kBlockRows;
    if (first >= matrix.rows) {
        std::memset(out, 0, count * sizeof *out);
        return;
    }
    for (std::size_t t = 0, now; t < count; t += now) {
        if (t < x.in_sets) {
            now = std::min(kSetRows, x.in_sets - t);
            kernels.sets(matrix.format)(
                matrix.data + block * block_bytes(matrix.format, matrix.columns),
                tiles_of(matrix.format, matrix.columns), x.from(t).sets, now, out + t);
            continue;
        }
        const std::byte* const* const from = x.from(t).rows;
        now = std::min<std::size_t>(kMaxRows, count - t);
        if (matrix.format == Format::kBf16) {
            const SplitGroup* rows[kMaxRows];
            for (std::size_t i = 0; i < now; ++i)
                rows[i] = reinterpret_cast<const SplitGroup*>(from[i]);
            const std::size_t there = std::min(kBlockRows, matrix.rows - first);
            if (there < kBlockRows) std::memset(out + t, 0, now * sizeof *out);
            kernels.bf16(reinterpret_cast<const std::uint16_t*>(matrix.data) +
                             first * matrix.columns,
                         matrix.columns, there, rows, static_cast<int>(now), out + t);
        } else {
            const QuantGroup* rows[kMaxRows];
            for (std::size_t i = 0; i < now; ++i)
                rows[i] = reinterpret_cast<const QuantGroup*>(from[i]);
            loop_of(kernels, matrix.format)(
                matrix.data + block * block_bytes(matrix.format, matrix.columns),
                tiles_of(matrix.format, matrix.columns), rows, static_cast<int>(now), out + t);
        }
    }
    add_bias(matrix, first, count, out);
}

bool has_sets(const Kernels& kernels, Format format) {
    return kernels.sets != nullptr && kernels.sets(format) != nullptr;
}

std::size_t piece_blocks(const Matrix& matrix) {
    return matrix.rows <= kFewRows ? 1 : kPieceBlocks;
}

std::size_t pieces_of(const Matrix& matrix) {
    return ceil_div(matrix.rows, kBlockRows * piece_blocks(matrix));
}

// Computes one piece of outputs: x[i] times the piece's rows, into row place(i) of out.
template <class Place>
void multiply_piece(const Kernels& kernels, const Matrix& matrix, std::size_t piece,
                    Company x, std::size_t count, std::byte* out, Dtype dtype,
                    Place place) noexcept {
    alignas(64) float values[kChunkRows][kBlockRows];
    const std::size_t stride = matrix.rows * item_bytes(dtype), blocks = piece_blocks(matrix);
    for (std::size_t start = 0; start < count; start += kChunkRows) {
        const std::size_t now = std::min(kChunkRows, count - start);
        for (std::size_t b = piece * blocks; b < (piece + 1) * blocks; ++b) {
            const std::size_t first = b * kBlockRows;
            if (first >= matrix.rows) break;
            multiply(kernels, matrix, b, x.from(start), now, values);
            const std::size_t there = std::min(kBlockRows, matrix.rows - first);
            for (std::size_t i = 0; i < now; ++i)
                store_row(values[i], there, out + place(start + i) * stride, dtype, first);
        }
    }
}

struct Expert {
    Matrix gate, up, down;  // gate.data is null without a gate
    std::span<const std::int64_t> places;
    std::size_t in_sets;               // of its rows; the others follow
    std::size_t first_set, first_row;  // among those of all experts

    Expert(const ExpertShape& shape, const ExpertRows& from, std::size_t rows_in, std::size_t set,
           std::size_t row)
        : gate{nullptr, shape.format, shape.intermediate, shape.hidden},
          up{from.weights + shape.up_offset(), shape.format, shape.intermediate, shape.hidden},
          down{from.weights + shape.down_offset(), shape.down, shape.hidden, shape.intermediate},
          places(from.places),
          in_sets(rows_in),
          first_set(set),
          first_row(row) {
        const bool gated = is_gated(shape.activation);
        if (gated) gate.data = from.weights;
        if (!shape.biased) return;
        const auto* bias =
            reinterpret_cast<const std::uint16_t*>(from.weights + shape.bias_offset());
        if (gated) {
            gate.bias = bias;
            bias += shape.intermediate;
        }
        up.bias = bias;
        down.bias = bias + shape.intermediate;
    }
};

// Computes group `group` of the middle rows: activation(gate · x, up · x) for 32 columns of F.
void between(const Kernels& kernels, Activation activation, const Expert& expert,
             std::size_t group, Company x, Inputs& middle) noexcept {
    alignas(64) float gate[2][kChunkRows][kBlockRows], up[2][kChunkRows][kBlockRows];
    const std::size_t count = expert.places.size();
    for (std::size_t start = 0; start < count; start += kChunkRows) {
        const std::size_t now = std::min(kChunkRows, count - start);
        const Company rows = x.from(start);
        for (std::size_t half = 0; half < 2 && is_gated(activation); ++half)  // stream by stream
            multiply(kernels, expert.gate, 2 * group + half, rows, now, gate[half]);
        for (std::size_t half = 0; half < 2; ++half)
            multiply(kernels, expert.up, 2 * group + half, rows, now, up[half]);
        for (std::size_t i = 0; i < now; ++i) {
            alignas(64) float g[kGroup], u[kGroup], values[kGroup];
            for (std::size_t half = 0; half < 2; ++half) {
                if (is_gated(activation))
                    std::memcpy(g + half * kBlockRows, gate[half][i], sizeof gate[half][i]);
                std::memcpy(u + half * kBlockRows, up[half][i], sizeof up[half][i]);
            }
            activate(activation, g, u, values);
            const std::size_t row = start + i;
            if (row < expert.in_sets)
                middle.sets.fill_group(expert.first_set + row / kSetRows, row % kSetRows, group,
                                       values);
            else
                middle.rows.fill_group(expert.first_row + row - expert.in_sets, group, values);
        }
    }
}

static_assert(kGroup == 2 * kBlockRows, "between() makes one group of two row blocks");

thread_local Scratch x_scratch, middle_scratch;
std::atomic<const Kernels*> chosen{nullptr};

const Kernels* fastest() noexcept {
#if defined(__x86_64__)
    if (has_amx()) return &kAmxKernels;
    if (has_avx512()) return &kAvx512Kernels;
    if (has_avx2()) return &kAvx2Kernels;
#elif defined(__aarch64__)
    if (platform::cpu().i8mm) return &kNeonI8mmKernels;
    if (platform::cpu().dot_product) return &kNeonKernels;
#endif
    return &kPortableKernels;
}

}  // namespace

namespace {

// Computes some of the experts of a call. Its memory grows with their rows.
void run_experts(ThreadPool& pool, const Kernels& kernels, const ExpertShape& shape,
                 std::span<const ExpertRows> experts, const std::byte* x, std::size_t top_k,
                 std::byte* out, Dtype dtype) {
    constexpr auto kUnnamed = std::numeric_limits<std::size_t>::max();
    const bool sets = has_sets(kernels, shape.format) && has_sets(kernels, shape.down);
    std::vector<Expert> all;
    std::vector<std::size_t> tokens, row_of;  // tokens[row_of[t]] = t, for tokens with a place
    std::vector<std::size_t> owner;           // of every set: its expert
    std::size_t row_count = 0;                // outside of sets
    for (const ExpertRows& expert : experts) {
        const std::size_t count = expert.places.size();
        const std::size_t in_sets = sets ? rows_in_sets(count) : 0;
        all.emplace_back(shape, expert, in_sets, owner.size(), row_count);
        owner.resize(owner.size() + ceil_div(in_sets, kSetRows), all.size() - 1);
        row_count += count - in_sets;
        for (const std::int64_t place : expert.places) {
            const std::size_t token = static_cast<std::size_t>(place) / top_k;
            if (token >= row_of.size()) row_of.resize(token + 1, kUnnamed);
            if (row_of[token] != kUnnamed) continue;
            row_of[token] = tokens.size();
            tokens.push_back(token);
        }
    }
    Inputs inputs(shape.format, shape.hidden), middle(shape.down, shape.intermediate);
    inputs.place(x_scratch.take(inputs.bytes(tokens.size(), owner.size())), tokens.size());
    middle.place(middle_scratch.take(middle.bytes(row_count, owner.size())), row_count);
    fill_all(pool, inputs.rows, x, tokens.size(), shape.hidden, dtype,
             [&](std::size_t i) { return tokens[i]; });
    const auto input_of = [&](std::int64_t place) {
        return inputs.rows.row(row_of[static_cast<std::size_t>(place) / top_k]);
    };
    pool.parallel_for(owner.size(), [&](std::size_t set) {
        const Expert& expert = all[owner[set]];
        const std::size_t start = (set - expert.first_set) * kSetRows;
        const std::size_t now = std::min(kSetRows, expert.in_sets - start);
        inputs.sets.fill(set, now, [&](std::size_t lane) {
            return reinterpret_cast<const QuantGroup*>(input_of(expert.places[start + lane]));
        });
        if (now < kSetRows) middle.sets.clear(set);
    });
    std::vector<const std::byte*> input_rows, middle_rows;  // those that are in no set
    for (const Expert& expert : all)
        for (const std::int64_t place : expert.places.subspan(expert.in_sets)) {
            middle_rows.push_back(middle.rows.row(input_rows.size()));
            input_rows.push_back(input_of(place));
        }
    const auto company = [](const Expert& expert, const RowSets& in,
                            const std::vector<const std::byte*>& rows) -> Company {
        return {rows.data() + expert.first_row, in.set(expert.first_set), in.groups(),
                expert.in_sets};
    };
    const std::size_t groups = middle.rows.groups();
    pool.parallel_for(all.size() * groups, [&](std::size_t piece) {
        const Expert& expert = all[piece / groups];
        between(kernels, shape.activation, expert, piece % groups,
                company(expert, inputs.sets, input_rows), middle);
    });
    const std::size_t pieces = all.empty() ? 0 : pieces_of(all[0].down);
    pool.parallel_for(all.size() * pieces, [&](std::size_t piece) {
        const Expert& expert = all[piece / pieces];
        multiply_piece(kernels, expert.down, piece % pieces,
                       company(expert, middle.sets, middle_rows), expert.places.size(), out, dtype,
                       [&](std::size_t i) { return static_cast<std::size_t>(expert.places[i]); });
    });
}

}  // namespace

void expert_ffn(ThreadPool& pool, const Kernels& kernels, const ExpertShape& shape,
                std::span<const ExpertRows> experts, const std::byte* x, std::size_t top_k,
                std::byte* out, Dtype dtype) {
    while (!experts.empty()) {
        std::size_t some = 0, rows = 0;
        while (some < experts.size() && rows < kRowsAtOnce) rows += experts[some++].places.size();
        run_experts(pool, kernels, shape, experts.first(some), x, top_k, out, dtype);
        experts = experts.subspan(some);
    }
}

void linear(ThreadPool& pool, const Kernels& kernels, const Matrix& weights, const std::byte* x,
            Dtype x_dtype, std::size_t count, std::byte* out, Dtype out_dtype) {
    const Product product{weights, out};
    linears(pool, kernels, {&product, 1}, x, x_dtype, count, out_dtype);
}

void linears(ThreadPool& pool, const Kernels& kernels, std::span<const Product> products,
             const std::byte* x, Dtype x_dtype, std::size_t count, Dtype out_dtype) {
    std::vector<Inputs> forms;               // of x, one for every format of weights
    std::vector<std::size_t> form_of, ends;  // by product: its form, the end of its pieces
    const std::size_t in_sets = rows_in_sets(count), set_count = ceil_div(in_sets, kSetRows);
    std::size_t bytes = 0, pieces = 0;
    for (const auto& [weights, out] : products) {
        const auto same = [&](const Inputs& form) { return form.rows.format() == weights.format; };
        const auto found = std::find_if(forms.begin(), forms.end(), same);
        form_of.push_back(static_cast<std::size_t>(found - forms.begin()));
        if (found == forms.end())
            bytes += forms.emplace_back(weights.format, weights.columns).bytes(count, set_count);
        ends.push_back(pieces += pieces_of(weights));
    }
    std::byte* base = x_scratch.take(bytes);
    std::vector<const std::byte*> rows;  // [forms][count]
    std::vector<Company> companies;      // by form
    rows.reserve(forms.size() * count);  // companies point to them
    for (Inputs& form : forms) {
        form.place(base, count);
        base += form.bytes(count, set_count);
        fill_all(pool, form.rows, x, count, products[0].weights.columns, x_dtype,
                 [](std::size_t i) { return i; });
        Company& all = companies.emplace_back(Company{rows.data() + rows.size()});
        for (std::size_t t = 0; t < count; ++t) rows.push_back(form.rows.row(t));
        if (!has_sets(kernels, form.rows.format())) continue;
        pool.parallel_for(set_count, [&](std::size_t set) {
            const std::size_t first = set * kSetRows, now = std::min(kSetRows, in_sets - first);
            form.sets.fill(set, now, [&](std::size_t lane) {
                return reinterpret_cast<const QuantGroup*>(form.rows.row(first + lane));
            });
        });
        all = {all.rows + in_sets, form.sets.set(0), form.sets.groups(), in_sets};
    }
    pool.parallel_for(pieces, [&](std::size_t piece) {
        std::size_t p = 0;
        while (piece >= ends[p]) ++p;
        const std::size_t first = p == 0 ? 0 : ends[p - 1];
        multiply_piece(kernels, products[p].weights, piece - first, companies[form_of[p]], count,
                       products[p].out, out_dtype, [](std::size_t i) { return i; });
    });
}

void combine(const std::byte* rows, const float* weights, std::size_t count, std::size_t top_k,
             std::size_t width, std::byte* out, Dtype dtype) noexcept {
    constexpr std::size_t kPart = 256;
    const std::size_t item = item_bytes(dtype);
    for (std::size_t t = 0; t < count; ++t)
        for (std::size_t first = 0; first < width; first += kPart) {
            const std::size_t now = std::min(kPart, width - first);
            float sums[kPart];
            for (std::size_t k = 0; k < top_k; ++k) {
                const std::byte* const row = rows + ((t * top_k + k) * width + first) * item;
                float values[kPart];
                load_row(row, now, dtype, values);
                const float weight = weights[t * top_k + k];
                if (k == 0)
                    for (std::size_t i = 0; i < now; ++i) sums[i] = values[i] * weight;
                else
                    for (std::size_t i = 0; i < now; ++i) sums[i] += values[i] * weight;
            }
            store_row(sums, now, out + t * width * item, dtype, first);
        }
}

const Kernels& current_kernels() noexcept {
    const Kernels* kernels = chosen.load(std::memory_order_relaxed);
    if (kernels == nullptr) chosen.store(kernels = fastest(), std::memory_order_relaxed);
    return *kernels;
}

bool use_kernels(std::string_view name) noexcept {
    const Kernels* wanted = nullptr;
    if (name.empty()) wanted = fastest();
    if (name == kPortableKernels.name) wanted = &kPortableKernels;
#if defined(__x86_64__)
    if (name == kAvx2Kernels.name && has_avx2()) wanted = &kAvx2Kernels;
    if (name == kAvx512Kernels.name && has_avx512()) wanted = &kAvx512Kernels;
    if (name == kAmxKernels.name && has_amx()) wanted = &kAmxKernels;
#elif defined(__aarch64__)
    if (name == kNeonKernels.name && platform::cpu().dot_product) wanted = &kNeonKernels;
    if (name == kNeonI8mmKernels.name && platform::cpu().i8mm) wanted = &kNeonI8mmKernels;
#endif
    if (wanted != nullptr) chosen.store(wanted, std::memory_order_relaxed);
    return wanted != nullptr;
}

}  // namespace moeinf
