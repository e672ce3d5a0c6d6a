// Tensor memory as allocation, moves and products share it.
#pragma once
#include "matrix.h"

// A cell relative to some first lane and column.
struct Cell {
  u32 lane, column;
};

TensorMemory& tmem_of(Cta&);
// The other CTA of the pair.
Cta& peer_of(Cluster&, const Cta&, const char* what);
void check_columns(Cta&, u32 first, u32 count, const char* what);
void check_written(Cluster&, Cta&, u32 lane, u32 column, u32 count, const char* what);

// tensor_product.cpp
Step op_tensor_multiply(Context&);
Step op_tensor_copy(Context&);
Step op_tensor_commit(Context&);
