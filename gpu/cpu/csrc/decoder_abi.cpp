// What gpu/cpu/compiled.py calls. Those that may run out of memory say so by giving 0.
#include <new>

#include "decoder.h"
#include "pack.h"

using namespace trioserve::TRIOSERVE_ISA;

namespace {

// The products of a model by number, as Python names them: the embedding, the head, then each
// layer's, the last two of them each expert's.
enum Which : int32_t {
  kEmbedding, kHead, kQkv, kOutput, kGateUp, kDown, kRouter, kExpertGateUp, kExpertDown
};
enum Vector : int32_t { kNorm, kAttentionNorm, kMlpNorm, kQkNorm };
enum Source : int32_t { kFromBf16, kFromFloat, kFromBlocks };

Product& product_of(Decoder& decoder, Which which, int64_t layer, int64_t expert) {
  switch (which) {
    case kEmbedding: return decoder.embedding;
    case kHead: return decoder.head;
    case kQkv: return decoder.layers[layer].qkv;
    case kOutput: return decoder.layers[layer].output;
    case kGateUp: return decoder.layers[layer].gate_up;
    case kDown: return decoder.layers[layer].down;
    case kRouter: return decoder.layers[layer].router;
    case kExpertGateUp: return decoder.layers[layer].experts[expert].gate_up;
    default: return decoder.layers[layer].experts[expert].down;
  }
}

template <typename T>
const T* keep(Memory& memory, const T* values, int64_t count) {
  T* kept = memory.take<T>(count);
  std::copy_n(values, count, kept);
  return kept;
}

}  // namespace

extern "C" {

Decoder* TRIOSERVE_EXPORT(decoder_create)(const DecoderShape* shape) {
  try {
    return new Decoder(*shape);
  } catch (const std::exception&) {  // no memory, or no room for another thread
    return nullptr;
  }
}

void TRIOSERVE_EXPORT(decoder_destroy)(Decoder* decoder) { delete decoder; }

// Packs one more segment of a product, the next along its outputs. `weight` is [outputs, inputs].
// `expert` is for the products of experts; their layer must have been set.
int32_t TRIOSERVE_EXPORT(decoder_add_segment)(Decoder* decoder, int32_t which, int64_t layer, int64_t expert,
                            int32_t kind, int32_t source, const void* weight, int64_t outputs,
                            int64_t inputs) {
  Product& product = product_of(*decoder, static_cast<Which>(which), layer, expert);
  const Kind packed = static_cast<Kind>(kind);
  try {
    void* memory = decoder->weights().take_bytes(packed_bytes(packed, outputs, inputs));
    decoder->pool().run([&](const Team& team) {
      if (source == kFromBf16)
        pack_bf16(team, packed, outputs, inputs, static_cast<const bf16*>(weight), memory);
      else if (source == kFromFloat)
        pack_float(team, packed, outputs, inputs, static_cast<const float*>(weight), memory);
      else
        pack_blocks(team, packed, outputs, inputs, static_cast<const uint8_t*>(weight), memory);
    });
    Segment& segment = product.segments[product.num_segments++];
    segment.kind = packed;
    segment.first = product.outputs;
    segment.outputs = outputs;
    segment.packed = memory;
    product.inputs = inputs;
    product.outputs += outputs;
  } catch (const std::bad_alloc&) {
    return 0;
  }
  return 1;
}

int32_t TRIOSERVE_EXPORT(decoder_set_bias)(Decoder* decoder, int32_t which, int64_t layer, const float* bias,
                         int64_t outputs) {
  try {
    product_of(*decoder, static_cast<Which>(which), layer, 0).bias =
        keep(decoder->weights(), bias, outputs);
  } catch (const std::bad_alloc&) {
    return 0;
  }
  return 1;
}

int32_t TRIOSERVE_EXPORT(decoder_set_vector)(Decoder* decoder, int32_t which, int64_t layer, const bf16* values,
                           int64_t count) {
  try {
    const bf16* kept = keep(decoder->weights(), values, count);
    switch (static_cast<Vector>(which)) {
      case kNorm: decoder->norm = kept; break;
      case kAttentionNorm: decoder->layers[layer].attention_norm = kept; break;
      case kMlpNorm: decoder->layers[layer].mlp_norm = kept; break;
      case kQkNorm: decoder->layers[layer].qk_norm = {kept, decoder->shape.rms_norm_eps}; break;
    }
  } catch (const std::bad_alloc&) {
    return 0;
  }
  return 1;
}

int32_t TRIOSERVE_EXPORT(decoder_set_layer)(Decoder* decoder, int64_t layer, int64_t window, int32_t rotate,
                          int32_t has_experts) {
  try {
    Layer& given = decoder->layers[layer];
    given.window = window;
    given.rotate = rotate != 0;
    given.experts.resize(has_experts ? decoder->shape.num_experts : 0);
  } catch (const std::bad_alloc&) {
    return 0;
  }
  return 1;
}

// The bytes that the ranks of a model share.
int64_t TRIOSERVE_EXPORT(decoder_ranks_bytes)(const DecoderShape* shape, const RanksShape* ranks,
                                              int64_t max_tokens, int64_t max_rank) {
  return ranks_bytes(*ranks, ranks_limits(*shape, max_tokens, max_rank));
}

// `ranks` is null if the model is whole.
int32_t TRIOSERVE_EXPORT(decoder_finish)(Decoder* decoder, const DecoderLimits* limits, const float* cos_sin,
                                         const RanksShape* ranks) {
  try {
    decoder->finish(*limits, cos_sin, ranks);
  } catch (const std::bad_alloc&) {
    return 0;
  }
  return 1;
}

const bf16* TRIOSERVE_EXPORT(decoder_hidden)(const Decoder* decoder) { return decoder->hidden(); }

bf16* TRIOSERVE_EXPORT(decoder_states)(Decoder* decoder) { return decoder->states(); }

void TRIOSERVE_EXPORT(decoder_copy_pages)(Decoder* decoder, const int32_t (*pairs)[2], int64_t count) {
  decoder->copy_pages(pairs, count);
}

int64_t TRIOSERVE_EXPORT(decoder_page_numbers)(const Decoder* decoder) { return decoder->page_numbers(); }

void TRIOSERVE_EXPORT(decoder_read_page)(const Decoder* decoder, int32_t page, bf16* to) {
  decoder->read_page(page, to);
}

void TRIOSERVE_EXPORT(decoder_write_page)(Decoder* decoder, int32_t page, const bf16* from) {
  decoder->write_page(page, from);
}

void TRIOSERVE_EXPORT(decoder_embed)(Decoder* decoder, const int32_t* tokens, int64_t count) {
  decoder->embed(tokens, count);
}

void TRIOSERVE_EXPORT(decoder_forward)(Decoder* decoder, const int32_t* tokens, const AttentionStep* step,
                     const AdapterStep* adapters) {
  decoder->forward(tokens, *step, adapters);
}

void TRIOSERVE_EXPORT(decoder_logits)(Decoder* decoder, const bf16* hidden, const int32_t* rows, int64_t count,
                    float* logits) {
  decoder->logits(hidden, rows, count, logits);
}

void TRIOSERVE_EXPORT(decoder_most_probable)(Decoder* decoder, const bf16* hidden, const int32_t* rows,
                           int64_t count, int32_t* best) {
  decoder->most_probable(hidden, rows, count, best);
}

}  // extern "C"
