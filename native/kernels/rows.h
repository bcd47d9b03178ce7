// Rows of activations as one call keeps them for its products: one by one, or in sets (AMX).
#pragma once

#include <cstring>

#include "kernels/activations.h"
#include "kernels/kernels.h"

namespace moeinf {

// Rows of activations in the form that a format's kernel reads.
class Rows {
  public:
    Rows(Format format, std::size_t columns)  // without memory
        : format_(format), columns_(columns), stride_(groups_of(format, columns) * group_bytes()) {}

    void place(std::byte* base) { base_ = base; }
    Format format() const { return format_; }
    std::size_t stride() const { return stride_; }

    std::size_t groups() const { return groups_of(format_, columns_); }
    const std::byte* row(std::size_t index) const { return base_ + index * stride_; }

    void fill(std::size_t index, RowView row) noexcept {
        std::byte* const to = base_ + index * stride_;
        if (format_ == Format::kBf16)
            split_row(row, columns_, reinterpret_cast<SplitGroup*>(to));
        else
            quantise_row(row, columns_, format_, reinterpret_cast<QuantGroup*>(to));
    }

    void fill_group(std::size_t index, std::size_t group, const float* values) noexcept {
        std::byte* const to = base_ + index * stride_ + group * group_bytes();
        if (format_ == Format::kBf16)
            split_group(values, reinterpret_cast<SplitGroup*>(to));
        else
            quantise_group(values, format_, reinterpret_cast<QuantGroup*>(to));
    }

  private:
    std::size_t group_bytes() const {
        return format_ == Format::kBf16 ? sizeof(SplitGroup) : sizeof(QuantGroup);
    }

    Format format_;
    std::size_t columns_;
    std::size_t stride_;
    std::byte* base_ = nullptr;
};

// Rows of activations in sets. Every group of a set is one RowSet.
class RowSets {
  public:
    RowSets(Format format, std::size_t columns)  // without memory
        : format_(format), groups_(groups_of(format, columns)) {}

    std::size_t set_bytes() const { return groups_ * sizeof(RowSet); }
    void place(std::byte* base) { base_ = reinterpret_cast<RowSet*>(base); }
    std::size_t groups() const { return groups_; }
    const RowSet* set(std::size_t index) const { return base_ + index * groups_; }

    // Makes a set of `count` rows, row_of(i) each; the others are zeros.
    template <class RowOf>
    void fill(std::size_t index, std::size_t count, RowOf row_of) noexcept {
        clear(index);
        for (std::size_t lane = 0; lane < count; ++lane) {
            const QuantGroup* const row = row_of(lane);
            for (std::size_t g = 0; g < groups_; ++g) put(index, lane, g, row[g]);
        }
    }

    void clear(std::size_t index) noexcept {
        std::memset(static_cast<void*>(base_ + index * groups_), 0, set_bytes());
    }

    void fill_group(std::size_t index, std::size_t lane, std::size_t group,
                    const float* values) noexcept {
        QuantGroup quantised;
        quantise_group(values, format_, &quantised);
        put(index, lane, group, quantised);
    }

  private:
    void put(std::size_t index, std::size_t lane, std::size_t group,
             const QuantGroup& from) noexcept {
        RowSet& to = base_[index * groups_ + group];
        std::memcpy(to.codes[lane], from.codes, kGroup);
        to.scales[lane] = from.scale;
        to.levels[lane] = has_minima(format_) ? static_cast<float>(from.start) : 0.0f;
    }

    Format format_;
    std::size_t groups_;
    RowSet* base_ = nullptr;
};

// The factors of matrices of one format: rows one by one, and sets of them.
struct Inputs {
    Rows rows;
    RowSets sets;

    Inputs(Format format, std::size_t columns) : rows(format, columns), sets(format, columns) {}

    std::size_t bytes(std::size_t row_count, std::size_t set_count) const {
        return row_bytes(row_count) + set_count * sets.set_bytes();
    }
    void place(std::byte* base, std::size_t row_count) {
        rows.place(base);
        sets.place(base + row_bytes(row_count));
    }

  private:
    std::size_t row_bytes(std::size_t count) const {  // whole cache lines
        return ceil_div(count * rows.stride(), 64) * 64;
    }
};

// The rows of one product: those in sets, and after them the others one by one.
struct Company {
    const std::byte* const* rows;      // [those that are in no set]
    const RowSet* sets = nullptr;
    std::size_t groups = 0;            // of a set
    std::size_t in_sets = 0;           // rows

    Company from(std::size_t start) const {  // a multiple of kSetRows, or at least in_sets
        if (start >= in_sets) return {rows + (start - in_sets)};
        return {rows, sets + start / kSetRows * groups, groups, in_sets - start};
    }
};

// Returns how many of `count` rows are worth multiplying in sets: all, or not a small last part.
constexpr std::size_t rows_in_sets(std::size_t count) {
    constexpr std::size_t kFew = 6;  // rows that are as fast one by one
    return count % kSetRows > kFew ? count : count / kSetRows * kSetRows;
}

// Returns make<format>() of a quantised format, null for bf16.
template <class Make>
constexpr SetLoop set_loop_of(Format format, Make make) {
    switch (format) {
        case Format::kQ8: return make.template operator()<Format::kQ8>();
        case Format::kQ4: return make.template operator()<Format::kQ4>();
        case Format::kQ3: return make.template operator()<Format::kQ3>();
        case Format::kQ2: return make.template operator()<Format::kQ2>();
        case Format::kMxfp4: return make.template operator()<Format::kMxfp4>();
        case Format::kQ4k: return make.template operator()<Format::kQ4k>();
        case Format::kQ5k: return make.template operator()<Format::kQ5k>();
        case Format::kQ6k: return make.template operator()<Format::kQ6k>();
        case Format::kNvfp4: return make.template operator()<Format::kNvfp4>();
        case Format::kBf16: break;
    }
    return nullptr;
}

}  // namespace moeinf
