// Choosing tokens from logits on the device, with the meaning that engine/sampler.py gives to the parameters.
//
// One block a row. Probabilities relative to the likeliest token are weighed in fixed point, so that sums do not depend on
// the order of addition. Thresholds (top-k, top-p) are found bit group by bit group in histograms of the probabilities' bits;
// nearly always among a few thousand tokens, the likeliest, which are listed first.
#include "common.cuh"

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / 32;
constexpr int INVALID_TOKEN = -1;
constexpr int LISTED = 4096;               // likely tokens that are kept in shared memory
constexpr int CUTS = 10;                   // tokens are likely from 2^-2, 2^-4, … of the likeliest
constexpr float WEIGHT_ONE = 17592186044416.0f;  // 2^44: sums of 2^19 tokens fit in 63 bits

struct Row {
    u64 key, position;  // of the row's random number
    float inverse_temperature, top_p, min_p;
    int top_k;  // 0: all
    int index;  // row of the logits
    int greedy;
};

// Philox 4x64 with 10 rounds (Salmon et al. 2011); the first number of numpy.random.Philox(key=key, counter=position).
DEVICE double uniform(u64 key, u64 position) {
    u64 c0 = position + 1, c1 = c0 == 0 ? 1 : 0, c2 = 0, c3 = 0, k0 = key, k1 = 0;
    for (int round = 0; round < 10; ++round) {
        u64 high0 = __umul64hi(0xD2E7470EE14C6C93ull, c0), low0 = 0xD2E7470EE14C6C93ull * c0;
        u64 high1 = __umul64hi(0xCA5A826395121157ull, c2), low1 = 0xCA5A826395121157ull * c2;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B97F4A7C15ull;
        k1 += 0xBB67AE8584CAA73Bull;
    }
    return double(c0 >> 11) * (1.0 / 9007199254740992.0);
}

DEVICE u64 weight(u32 bits) { return u64(__uint_as_float(bits) * WEIGHT_ONE); }

// The probabilities of likely tokens, in no order.
struct List {
    const u32* values;
    int size;
    DEVICE u32 bits(int i) const { return values[i]; }
    DEVICE int count() const { return size; }
};

struct Sampler {
    const float* logits;
    int vocabulary;
    float peak, inverse_temperature;

    // Of a token's probability relative to the likeliest; order and sum are those of the float.
    DEVICE u32 bits(int token) const { return __float_as_uint(__expf((logits[token] - peak) * inverse_temperature)); }
    DEVICE int count() const { return vocabulary; }

    // The largest probability of which those that are not less (and not below `floor`) weigh `target` together.
    // `COUNT`: each token weighs one.
    template <bool COUNT, class Tokens>
    static DEVICE u32 threshold(const Tokens& tokens, u32 floor, u64 target, u64* histogram) {
        __shared__ u32 found;
        __shared__ u64 remaining;
        u32 prefix = 0;
        for (int shift = 24; shift >= 0; shift -= 8) {
            for (int bin = threadIdx.x; bin < 256; bin += THREADS) histogram[bin] = 0;
            __syncthreads();
            for (int base = 0; base < tokens.count(); base += THREADS) {
                int token = base + threadIdx.x;
                u32 value = token < tokens.count() ? tokens.bits(token) : 0u;
                bool counts = value >= floor && value != 0 && (shift == 24 || value >> (shift + 8) == prefix);
                u32 counting = __ballot_sync(0xFFFFFFFFu, counts);
                if (!counts) continue;
                // Most tokens fall into few bins: those of a warp that share one are added first.
                u32 bin = (value >> shift) & 255u, peers = __match_any_sync(counting, bin);
                u64 sum = __popc(peers);
                if (!COUNT) {
                    u64 own = weight(value);
                    sum = __reduce_add_sync(peers, u32(own) & 0x3FFFFFu) + (u64(__reduce_add_sync(peers, u32(own >> 22))) << 22);
                }
                if ((threadIdx.x & 31) == u32(__ffs(peers) - 1)) atomicAdd(histogram + bin, sum);
            }
            __syncthreads();
            if (threadIdx.x == 0) {
                int bin = 255;
                while (bin > 0 && histogram[bin] < target) target -= histogram[bin--];
                found = prefix << 8 | u32(bin);
                remaining = target;
            }
            __syncthreads();
            prefix = found, target = remaining;
            __syncthreads();
        }
        return prefix;
    }

    // The least probability of which those that are not less fit the list.
    DEVICE u32 likely() const {
        __shared__ int sizes[CUTS];
        if (threadIdx.x < CUTS) sizes[threadIdx.x] = 0;
        __syncthreads();
        int counts[CUTS] = {};
        for (int token = threadIdx.x; token < vocabulary; token += THREADS) {
            u32 value = bits(token);
#pragma unroll
            for (int i = 0; i < CUTS; ++i) counts[i] += value >= cut(i);
        }
#pragma unroll
        for (int i = 0; i < CUTS; ++i) {
            int sum = __reduce_add_sync(0xFFFFFFFFu, counts[i]);
            if ((threadIdx.x & 31) == 0) atomicAdd(sizes + i, sum);
        }
        __syncthreads();
        int last = 0;
        while (last + 1 < CUTS && sizes[last + 1] <= LISTED) ++last;
        return cut(last);
    }

    static DEVICE u32 cut(int i) { return u32(127 - 2 * (i + 1)) << 23; }

    // Lists the tokens from `likely` up; returns how many there are, which may be more than are listed.
    DEVICE int list(u32 likely_from, u32* values) const {
        __shared__ int size;
        if (threadIdx.x == 0) size = 0;
        __syncthreads();
        for (int base = 0; base < vocabulary; base += THREADS) {
            int token = base + threadIdx.x;
            u32 value = token < vocabulary ? bits(token) : 0u;
            u32 likely = __ballot_sync(0xFFFFFFFFu, value >= likely_from);
            if (likely == 0) continue;
            int lane = threadIdx.x & 31, first = 0;
            if (lane == 0) first = atomicAdd(&size, __popc(likely));
            int place = __shfl_sync(0xFFFFFFFFu, first, 0) + __popc(likely & ((1u << lane) - 1));
            if (value >= likely_from && place < LISTED) values[place] = value;
        }
        __syncthreads();
        return size;
    }

    // Weight of the listed tokens from `floor` up.
    static DEVICE u64 listed_total(const List& list, u32 floor, u64* scratch) {
        u64 sum = 0;
        for (int i = threadIdx.x; i < list.size; i += THREADS)
            if (list.values[i] >= floor) sum += weight(list.values[i]);
        for (int offset = 16; offset > 0; offset >>= 1) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
        __syncthreads();
        if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = sum;
        __syncthreads();
        u64 all = 0;
        for (int i = 0; i < WARPS; ++i) all += scratch[i];
        __syncthreads();
        return all;
    }

    // Weight of the tokens from `floor` up, in each warp's share of the vocabulary and in all.
    DEVICE u64 total(u32 floor, u64* shares) const {
        int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
        u64 sum = 0;
        for (int token = begin(warp) + lane; token < begin(warp + 1); token += 32) {
            u32 value = bits(token);
            if (value >= floor) sum += weight(value);
        }
        for (int offset = 16; offset > 0; offset >>= 1) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, offset);
        __syncthreads();
        if (lane == 0) shares[warp] = sum;
        __syncthreads();
        u64 all = 0;
        for (int i = 0; i < WARPS; ++i) all += shares[i];
        return all;
    }

    DEVICE int begin(int warp) const { return int(i64(vocabulary) * warp / WARPS); }

    // The first token, in the order of ids, at which the sum of weights exceeds `target`; run by the warp that holds it.
    DEVICE int find(u32 floor, u64 target, u64 before, int warp) const {
        int lane = threadIdx.x & 31, last = INVALID_TOKEN;
        for (int base = begin(warp); base < begin(warp + 1); base += 32) {
            int token = base + lane;
            u32 value = token < begin(warp + 1) ? bits(token) : 0u;
            u64 own = value >= floor ? weight(value) : 0ull, sum = own;
            for (int offset = 1; offset < 32; offset <<= 1) {
                u64 other = __shfl_up_sync(0xFFFFFFFFu, sum, offset);
                if (lane >= offset) sum += other;
            }
            u32 reached = __ballot_sync(0xFFFFFFFFu, own > 0 && before + sum > target);
            if (reached) return base + __ffs(reached) - 1;
            u32 any = __ballot_sync(0xFFFFFFFFu, own > 0);
            if (any) last = base + 31 - __clz(any);
            before += __shfl_sync(0xFFFFFFFFu, sum, 31);
        }
        return last;
    }
};

// The largest logit and the first token that has it; NaN counts as the largest. Lower ids win ties.
struct Best {
    float value;
    int token;
    DEVICE void take(float other, int other_token) {
        bool larger = other > value || (other != other && value == value);
        bool same = other == value || (other != other && value != value);
        if (larger || (same && other_token < token)) value = other, token = other_token;
    }
};

// Grid: rows to choose for. tokens[i] becomes the choice of rows[i], INVALID_TOKEN where the logits are unusable.
extern "C" __global__ void __launch_bounds__(THREADS, 1) sample_rows(const float* all_logits, const Row* rows, int vocabulary, int* tokens) {
    __shared__ u64 histogram[256];
    __shared__ u32 listed[LISTED];
    __shared__ float best_values[WARPS];
    __shared__ int best_tokens[WARPS];
    let_next_kernel_start();
    wait_for_previous_kernel();
    Row row = rows[blockIdx.x];
    const float* logits = all_logits + i64(row.index) * vocabulary;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;

    Best best{MINUS_INFINITY, vocabulary};
    for (int token = threadIdx.x; token < vocabulary; token += THREADS) best.take(logits[token], token);
    for (int offset = 16; offset > 0; offset >>= 1)
        best.take(__shfl_xor_sync(0xFFFFFFFFu, best.value, offset), __shfl_xor_sync(0xFFFFFFFFu, best.token, offset));
    if (lane == 0) best_values[warp] = best.value, best_tokens[warp] = best.token;
    __syncthreads();
    for (int i = 0; i < WARPS; ++i) best.take(best_values[i], best_tokens[i]);
    bool usable = best.value - best.value == 0.0f;  // neither NaN nor infinite
    if (!usable || row.greedy) {
        if (threadIdx.x == 0) tokens[blockIdx.x] = usable ? best.token : INVALID_TOKEN;
        return;
    }

    Sampler sampler{logits, vocabulary, best.value, row.inverse_temperature};
    u32 floor = max(__float_as_uint(row.min_p), 1u);
    bool by_rank = row.top_k > 0 && row.top_k < vocabulary, by_mass = row.top_p < 1.0f;
    u32 likely_from = by_rank || by_mass ? sampler.likely() : 0u;
    List likely{listed, by_rank || by_mass ? sampler.list(likely_from, listed) : 0};
    bool all_listed = likely.size <= LISTED;
    if (by_rank)
        floor = max(floor, all_listed && likely.size >= row.top_k
                               ? Sampler::threshold<true>(likely, 1u, u64(row.top_k), histogram)
                               : Sampler::threshold<true>(sampler, 1u, u64(row.top_k), histogram));
    u64 all = 0;
    if (by_mass) {
        all = all_listed && floor >= likely_from ? Sampler::listed_total(likely, floor, histogram) : sampler.total(floor, histogram);
        u64 wanted = max(u64(double(all) * double(row.top_p)), u64(1));
        bool enough = all_listed && (floor >= likely_from || Sampler::listed_total(likely, floor, histogram) >= wanted);
        floor = max(floor, enough ? Sampler::threshold<false>(likely, floor, wanted, histogram)
                                  : Sampler::threshold<false>(sampler, floor, wanted, histogram));
    }
    all = sampler.total(floor, histogram);
    u64 target = u64(double(all) * uniform(row.key, row.position));
    u64 before = 0;
    int owner = 0;
    while (owner < WARPS - 1 && before + histogram[owner] <= target) before += histogram[owner++];
    if (warp == owner) {
        int token = sampler.find(floor, target, before, owner);
        if (lane == 0) tokens[blockIdx.x] = token;
    }
}
