"""Kernels of token dispatch: one operation a file, as Triton kernel and as torch reference.

    choose    softmax_topk, topk_softmax, sigmoid_topk       logits -> topk_ids, topk_weights
    route     route                                          counts, prefix sums, stable places
    move      pack, pack_fp8, unpack                         rows into messages and out of them
    convert   fp8                                            e4m3 with one scale per 128 elements
    compute   grouped_gemm, swiglu, combine

Each file has `_<operation>_kernel` (the body), `<operation>` (checks, allocates, starts) and
`<operation>_torch` (the same signature; what CPU tensors get). Import from the files: this package
imports nothing, so that Triton is not loaded before an operation is wanted.
"""
