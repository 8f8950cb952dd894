// Passes over rows of a vocabulary, several operations in each, on the caller's thread.
//
// A pass reads a row from the cache; torch's own operators would take several times as many. No pass branches on what a row
// holds. Float sums are taken in pieces, whose totals are added in double.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace {

using torch::headeronly::BFloat16;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kPiece = 1024; // tokens whose float sum loses little
// A scale is sought by halving the range of its logarithm, to some 0.15 bits, and then by Newton's steps.
constexpr int kHalvings = 10, kNewtonSteps = 4;
constexpr double kNothing = 1e-30; // replaces 0 as a divisor; the step is outside the bracket then
constexpr double kLeastMass = 0x1p-100; // float32 cannot resolve less (rows.py)
// Smaller powers of two are zero. Times p0, which is at least 2^-36 or zero, the least one is a normal number:
// processors take longer for subnormal ones, so time would depend on what a row holds.
constexpr float kLeastPower = -90.0f;

// 2^x for x <= 0, within 1e-7 of it. 2^x = 2^n 2^f with |f| <= 1/2, and the Taylor series of 2^f.
inline float exp2_of(float x) {
  const float bounded = std::max(x, kLeastPower);
  const float n = (bounded + 0x1.8p23f) - 0x1.8p23f; // to the nearest integer
  const float f = bounded - n;
  float power = 1.5252734e-5f;
  power = power * f + 1.5403530e-4f;
  power = power * f + 1.3333558e-3f;
  power = power * f + 9.6181291e-3f;
  power = power * f + 5.5504109e-2f;
  power = power * f + 2.4022651e-1f;
  power = power * f + 6.9314718e-1f;
  power = power * f + 1.0f;
  const float scaled = std::bit_cast<float>(std::bit_cast<int32_t>(power) + (static_cast<int32_t>(n) << 23));
  return x < kLeastPower ? 0.0f : scaled;
}

inline float clipped(float value, float low, float high) {
  return std::min(std::max(value, low), high);
}

// The compiler vectorizes this conversion, unlike that of BFloat16.
inline float wide(BFloat16 number) {
  return std::bit_cast<float>(static_cast<uint32_t>(number.x) << 16);
}

inline float wide(float number) {
  return number;
}

void check(const Tensor& rows, const Tensor& public_rows, ScalarType type, ScalarType row_type = ScalarType::Float) {
  STD_TORCH_CHECK(rows.scalar_type() == row_type && public_rows.scalar_type() == type, "rows must be of the expected types");
  STD_TORCH_CHECK(rows.stride(2) == 1 && public_rows.is_contiguous(), "rows must be contiguous");
  STD_TORCH_CHECK(rows.size(0) == public_rows.size(0) && rows.size(2) == public_rows.size(1), "rows must match the public ones");
}

// Calls work(row, index of the sequence, index of the row) for each row of [s, n, V].
template <typename T = float, typename Work>
void for_each_row(const Tensor& rows, Work work) {
  const T* const data = rows.const_data_ptr<T>();
  for (int64_t s = 0; s < rows.size(0); ++s) {
    for (int64_t i = 0; i < rows.size(1); ++i) {
      work(data + s * rows.stride(0) + i * rows.stride(1), s, s * rows.size(1) + i);
    }
  }
}

// Calls work(row, where it is clipped, index of the sequence, index of the row) for each row.
template <typename Work>
void for_each_clipped_row(const Tensor& rows, const Tensor& low, const Tensor& high, Work work) {
  STD_TORCH_CHECK(low.is_contiguous() && high.is_contiguous(), "bounds must be contiguous");
  const float *const lows = low.const_data_ptr<float>(), *const highs = high.const_data_ptr<float>();
  for_each_row(rows, [&](const float* row, int64_t s, int64_t index) { work(row, lows[index], highs[index], s, index); });
}

// Adds up term(x) over the vocabulary.
template <typename Term>
inline double sum_in_pieces(int64_t vocabulary, Term term) {
  double total = 0;
  for (int64_t first = 0; first < vocabulary; first += kPiece) {
    const int64_t last = std::min(first + kPiece, vocabulary);
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t x = first; x < last; ++x) {
      sum += term(x);
    }
    total += sum;
  }
  return total;
}

template <typename T>
void shape_rows(
    const Tensor& log_p,
    const Tensor& public_rows,
    const Tensor& public_bits,
    const Tensor& scales,
    Tensor& out) {
  check(log_p, public_rows, ScalarType::Float, torch::headeronly::CppTypeToScalarType<T>::value);
  check(out, public_bits, ScalarType::Float);
  STD_TORCH_CHECK(out.sizes() == log_p.sizes() && scales.is_contiguous(), "out must have the shape of the rows");
  const int64_t vocabulary = log_p.size(2);
  const float* const scale_of = scales.const_data_ptr<float>();
  float* const target = out.mutable_data_ptr<float>();
  for_each_row<T>(log_p, [&](const T* row, int64_t s, int64_t index) {
    const float* const p0 = public_rows.const_data_ptr<float>() + s * vocabulary;
    const float* const bits = public_bits.const_data_ptr<float>() + s * vocabulary;
    float* const u = target + s * out.stride(0) + (index - s * log_p.size(1)) * out.stride(1);
    const float scale = scale_of[s];
    float largest = -std::numeric_limits<float>::infinity();
    int unusable = 0;
#pragma omp simd reduction(max : largest) reduction(| : unusable)
    for (int64_t x = 0; x < vocabulary; ++x) {
      const float value = wide(row[x]) * scale - bits[x];
      unusable |= !(value <= std::numeric_limits<float>::max()); // NaN or infinity
      largest = value > largest ? value : largest;
      u[x] = value;
    }
    unusable |= !(largest >= std::numeric_limits<float>::lowest()); // no mass at all
    const float shift = unusable ? 0.0f : largest;
    const double mass = sum_in_pieces(vocabulary, [=](int64_t x) {
      u[x] = exp2_of(u[x] - shift);
      return u[x] * p0[x];
    });
    const bool usable = !unusable && mass > kLeastMass;
    const float share = usable ? static_cast<float>(1 / mass) : 0.0f;
#pragma omp simd
    for (int64_t x = 0; x < vocabulary; ++x) {
      const float instead = p0[x] > 0 ? 1.0f : 0.0f;
      u[x] = usable ? u[x] * share : instead;
    }
  });
}

void shape_parts(
    const Tensor& log_p,
    const Tensor& public_rows,
    const Tensor& public_bits,
    const Tensor& scales,
    Tensor out) {
  if (log_p.scalar_type() == ScalarType::BFloat16) {
    shape_rows<BFloat16>(log_p, public_rows, public_bits, scales, out);
  } else {
    shape_rows<float>(log_p, public_rows, public_bits, scales, out);
  }
}

Tensor clipped_means(const Tensor& rows, const Tensor& public_rows, const Tensor& low, const Tensor& high) {
  check(rows, public_rows, ScalarType::Float);
  const int64_t vocabulary = rows.size(2);
  Tensor means = torch::stable::empty({rows.size(0), rows.size(1)}, ScalarType::Float);
  float* const target = means.mutable_data_ptr<float>();
  for_each_clipped_row(rows, low, high, [&](const float* row, float least, float most, int64_t s, int64_t index) {
    const float* const p0 = public_rows.const_data_ptr<float>() + s * vocabulary;
    target[index] = static_cast<float>(sum_in_pieces(vocabulary, [=](int64_t x) { return clipped(row[x], least, most) * p0[x]; }));
  });
  return means;
}

Tensor clipped_moments(const Tensor& rows, const Tensor& public_rows, const Tensor& low, const Tensor& high) {
  check(rows, public_rows, ScalarType::Double);
  const int64_t vocabulary = rows.size(2), count = rows.size(0) * rows.size(1);
  Tensor moments = torch::stable::empty({2, rows.size(0), rows.size(1)}, ScalarType::Double);
  double* const target = moments.mutable_data_ptr<double>();
  for_each_clipped_row(rows, low, high, [&](const float* row, float least, float most, int64_t s, int64_t index) {
    const double* const p0 = public_rows.const_data_ptr<double>() + s * vocabulary;
    double mean = 0, second = 0;
#pragma omp simd reduction(+ : mean, second)
    for (int64_t x = 0; x < vocabulary; ++x) {
      const double value = clipped(row[x], least, most), weighted = value * p0[x];
      mean += weighted;
      second += value * weighted;
    }
    target[index] = mean;
    target[count + index] = second;
  });
  return moments;
}

void add_clipped(Tensor sums, const Tensor& rows, const Tensor& low, const Tensor& high, const Tensor& scales) {
  check(rows, sums, ScalarType::Double);
  STD_TORCH_CHECK(scales.is_contiguous(), "scales must be contiguous");
  const int64_t vocabulary = rows.size(2);
  double* const target = sums.mutable_data_ptr<double>();
  const double* const scale_of = scales.const_data_ptr<double>();
  for_each_clipped_row(rows, low, high, [&](const float* row, float least, float most, int64_t s, int64_t index) {
    double* const sum = target + s * vocabulary;
    const double scale = scale_of[index];
#pragma omp simd
    for (int64_t x = 0; x < vocabulary; ++x) {
      sum[x] += scale * clipped(row[x], least, most);
    }
  });
}

void add_steps(Tensor sums, const Tensor& logs, const Tensor& centres, const Tensor& drawn, double per_nat, double most) {
  check(logs, sums, ScalarType::Int);
  STD_TORCH_CHECK(centres.is_contiguous() && drawn.is_contiguous(), "centres and drawn must be contiguous");
  const int64_t vocabulary = logs.size(2);
  int32_t* const target = sums.mutable_data_ptr<int32_t>();
  const float* const centre_of = centres.const_data_ptr<float>();
  const bool* const is_drawn = drawn.const_data_ptr<bool>();
  const float unit = static_cast<float>(per_nat), limit = static_cast<float>(most);
  for_each_row(logs, [&](const float* row, int64_t s, int64_t index) {
    int32_t* const sum = target + s * vocabulary;
    const float centre = centre_of[index];
    const int32_t count = is_drawn[index];
#pragma omp simd
    for (int64_t x = 0; x < vocabulary; ++x) {
      sum[x] += count * static_cast<int32_t>(std::rint(clipped((row[x] + centre) * unit, -limit, limit)));
    }
  });
}

// Returns for each row the s at which p0 clamp(s u, low, high) sums to 1, nearly. log2 of it lies between least and most.
Tensor clip_scales(const Tensor& ratios, const Tensor& public_rows, double low, double high, double least, double most) {
  check(ratios, public_rows, ScalarType::Float);
  const int64_t vocabulary = ratios.size(2);
  const float lowest = static_cast<float>(low), highest = static_cast<float>(high);
  Tensor scales = torch::stable::empty({ratios.size(0), ratios.size(1), 1}, ScalarType::Float);
  float* const target = scales.mutable_data_ptr<float>();
  for_each_row(ratios, [&](const float* row, int64_t s, int64_t index) {
    const float* const p0 = public_rows.const_data_ptr<float>() + s * vocabulary;
    double bottom = least, top = most;
    for (int step = 0; step < kHalvings; ++step) {
      const double middle = (bottom + top) / 2;
      const float tried = static_cast<float>(std::exp2(middle));
      const bool smaller =
          sum_in_pieces(vocabulary, [=](int64_t x) { return clipped(row[x] * tried, lowest, highest) * p0[x]; }) < 1;
      bottom = smaller ? middle : bottom;
      top = smaller ? top : middle;
    }
    float below = static_cast<float>(std::exp2(bottom)), above = static_cast<float>(std::exp2(top));
    float scale = static_cast<float>(std::exp2((bottom + top) / 2));
    for (int step = 0; step < kNewtonSteps; ++step) {
      double mass = 0, unclipped = 0;
      for (int64_t first = 0; first < vocabulary; first += kPiece) {
        const int64_t last = std::min(first + kPiece, vocabulary);
        float sum = 0, inner = 0;
#pragma omp simd reduction(+ : sum, inner)
        for (int64_t x = first; x < last; ++x) {
          const float applied = row[x] * scale;
          sum += clipped(applied, lowest, highest) * p0[x];
          inner += applied > lowest && applied < highest ? applied * p0[x] : 0.0f;
        }
        mass += sum;
        unclipped += inner;
      }
      const double missing = 1 - mass;
      const float newton = static_cast<float>(scale * (1 + missing / std::max(unclipped, kNothing)));
      below = missing > 0 ? scale : below;
      above = missing < 0 ? scale : above;
      scale = newton >= below && newton <= above ? newton : std::sqrt(below) * std::sqrt(above);
    }
    target[index] = scale;
  });
  return scales;
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(privmix, library) {
  library.def("shape_parts(Tensor log_p, Tensor public, Tensor public_bits, Tensor scales, Tensor(a!) out) -> ()");
  library.def("clipped_means(Tensor rows, Tensor public, Tensor low, Tensor high) -> Tensor");
  library.def("clipped_moments(Tensor rows, Tensor public, Tensor low, Tensor high) -> Tensor");
  library.def("add_clipped(Tensor(a!) sums, Tensor rows, Tensor low, Tensor high, Tensor scales) -> ()");
  library.def("add_steps(Tensor(a!) sums, Tensor logs, Tensor centres, Tensor drawn, float per_nat, float most) -> ()");
  library.def("clip_scales(Tensor ratios, Tensor public, float low, float high, float least, float most) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(privmix, CPU, library) {
  library.impl("shape_parts", TORCH_BOX(&shape_parts));
  library.impl("clipped_means", TORCH_BOX(&clipped_means));
  library.impl("clipped_moments", TORCH_BOX(&clipped_moments));
  library.impl("add_clipped", TORCH_BOX(&add_clipped));
  library.impl("add_steps", TORCH_BOX(&add_steps));
  library.impl("clip_scales", TORCH_BOX(&clip_scales));
}
