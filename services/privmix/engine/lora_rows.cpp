// Computes the LoRA products of single rows, y += B (A x), each row with its own adapter, in one operator.
//
// All sums are in float32 and an output is rounded once. The work of a row does not depend on its adapter. parallel_for
// divides the rows among the threads of torch.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

namespace {

using torch::headeronly::BFloat16;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kMinWork = 65536; // multiplications that are worth the wake-up of a thread

// The B matrices of one slice of a layer, [slots, rank, width], and the first output column that they add to.
template <typename T>
struct Expansion {
  const T* weights;
  int64_t rank, width, offset;
};

// The compiler vectorizes these conversions, unlike those of BFloat16.
inline float wide(BFloat16 number) {
  return std::bit_cast<float>(static_cast<uint32_t>(number.x) << 16);
}

inline float wide(float number) {
  return number;
}

inline void narrow(float number, float& target) {
  target = number;
}

// Rounds to the nearest, ties to even, without the branch of BFloat16.
inline void narrow(float number, BFloat16& target) {
  const uint32_t bits = std::bit_cast<uint32_t>(number);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  target.x = static_cast<uint16_t>(number == number ? rounded : 0x7FC0);
}

template <typename T>
void widen(const T* source, float* target, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    target[i] = wide(source[i]);
  }
}

template <typename T>
float dot(const T* weights, const float* x, int64_t count) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) {
    sum += wide(weights[i]) * x[i];
  }
  return sum;
}

template <typename T>
void add_scaled(const T* weights, float scale, float* y, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    y[i] += wide(weights[i]) * scale;
  }
}

template <typename T>
void add_rows(
    const Tensor& y,
    const Tensor& x,
    const Tensor& rows,
    const Tensor& slots,
    const Tensor& shrink,
    const std::vector<Tensor>& expansions,
    const std::vector<int64_t>& offsets) {
  const int64_t inputs = x.size(1), ranks = shrink.size(1);
  std::vector<Expansion<T>> slices;
  int64_t widest = 0, work = ranks * inputs;
  for (size_t i = 0; i < expansions.size(); ++i) {
    const Tensor& weights = expansions[i];
    slices.push_back({weights.const_data_ptr<T>(), weights.size(1), weights.size(2), offsets[i]});
    widest = std::max(widest, weights.size(2));
    work += weights.size(1) * weights.size(2);
  }
  T* const outputs = y.mutable_data_ptr<T>();
  const T* const states = x.const_data_ptr<T>();
  const T* const a = shrink.const_data_ptr<T>();
  const int64_t* const row_of = rows.const_data_ptr<int64_t>();
  const int64_t* const slot_of = slots.const_data_ptr<int64_t>();
  const int64_t x_stride = x.stride(0), y_stride = y.stride(0);
  torch::stable::parallel_for(0, rows.size(0), (kMinWork + work - 1) / work, [&](int64_t begin, int64_t end) {
    std::vector<float> state(inputs), sums(widest);
    for (int64_t index = begin; index < end; ++index) {
      const int64_t row = row_of[index], slot = slot_of[index];
      widen(states + row * x_stride, state.data(), inputs);
      const T* rank_row = a + slot * ranks * inputs;
      for (const auto& slice : slices) {
        T* const target = outputs + row * y_stride + slice.offset;
        const T* b = slice.weights + slot * slice.rank * slice.width;
        widen(target, sums.data(), slice.width);
        for (int64_t r = 0; r < slice.rank; ++r, rank_row += inputs, b += slice.width) {
          add_scaled(b, dot(rank_row, state.data(), inputs), sums.data(), slice.width);
        }
#pragma omp simd
        for (int64_t j = 0; j < slice.width; ++j) {
          narrow(sums[j], target[j]);
        }
      }
    }
  });
}

void add_lora_rows(
    const Tensor& y,
    const Tensor& x,
    const Tensor& rows,
    const Tensor& slots,
    const Tensor& shrink,
    const std::vector<Tensor>& expansions,
    const std::vector<int64_t>& offsets) {
  STD_TORCH_CHECK(y.stride(1) == 1 && x.stride(1) == 1 && shrink.is_contiguous(), "rows and weights must be contiguous");
  STD_TORCH_CHECK(expansions.size() == offsets.size(), "each expansion needs an offset");
  for (const Tensor& weights : expansions) {
    STD_TORCH_CHECK(weights.is_contiguous() && weights.scalar_type() == shrink.scalar_type(), "weights must be contiguous and of one type");
  }
  STD_TORCH_CHECK(y.scalar_type() == shrink.scalar_type() && x.scalar_type() == shrink.scalar_type(), "rows and weights must be of one type");
  switch (shrink.scalar_type()) {
    case ScalarType::Float:
      return add_rows<float>(y, x, rows, slots, shrink, expansions, offsets);
    case ScalarType::BFloat16:
      return add_rows<BFloat16>(y, x, rows, slots, shrink, expansions, offsets);
    default:
      STD_TORCH_CHECK(false, "weights must be float32 or bfloat16");
  }
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(privmix, library) {
  library.def(
      "add_lora_rows(Tensor(a!) y, Tensor x, Tensor rows, Tensor slots, Tensor shrink, Tensor[] expansions, int[] offsets) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(privmix, CPU, library) {
  library.impl("add_lora_rows", TORCH_BOX(&add_lora_rows));
}
