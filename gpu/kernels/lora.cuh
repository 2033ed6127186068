// lora.cuh - what lora_shrink and lora_expand share: where adapters lie, and which tokens have which.
//
// An adapter adds B (A x) to a product's result for each of its tokens; its scale is in B. A product
// has up to three parts (queries, keys and values are one product), each with matrices of its own.
// Ranks are filled up with zeros to multiples of 16.
//
// A step's tokens that have adapters are put together by adapter and cut into tiles of up to 16, the
// rows of one mma.m16n8k16. What a token gets follows from its own row of x and its adapter alone,
// in an order that the shapes fix: neither the tile that it is in nor its place there matters.
#pragma once
#include "vectors.cuh"

constexpr int TILE = 16;    // tokens
constexpr int BLOCK = 16;   // ranks
constexpr int PARTS = 3;

// What one adapter has for one product. Offsets are in elements, from the start of its place.
struct Entry {
  i64 a;             // [sum of ranks, inputs]
  i64 b;             // the parts' [outputs, rank], one behind the other
  int ranks[PARTS];  // 0: the part has no update
  int unused;
};

struct Tile {
  int place;
  int first;  // of `tokens`
  int count;  // 0: there is no such tile
};

struct Parameters {
  const ELEMENT* x;       // [T, inputs]
  ELEMENT* y;             // [T, all outputs]
  const ELEMENT* places;  // [number of places, place_size]
  const Entry* entries;   // the product's in the first place; the next one's place_entries on
  const Tile* tiles;
  const int* tokens;  // those that have adapters, by adapter
  float* partial;     // [splits, max_tokens, rank_stride]: of A x, by the order of `tokens`
  i64 place_size;
  int place_entries;
  int inputs;         // a multiple of 8
  int outputs[PARTS]; // multiples of 8; 0: there is no such part
  int max_tokens;
  int rank_stride;
};
static_assert(sizeof(Parameters) == PARAMETERS_BYTES);
static_assert(sizeof(Entry) == 32);
