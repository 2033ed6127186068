"""Tensor parallel: each rank of a group of processes has a part of every layer.

The parts are those of Shoeybi et al., "Megatron-LM" (2019). Queries, keys, values, gate and up are
split by outputs, so a rank has some of the heads and a part of the intermediate size; output and
down are split by inputs, and their results are summed over the ranks. Embedding and head are split
by tokens of the vocabulary. Norms are whole on every rank.

Rank 0 *leads*: it has the slots and the sampler, and sends each step to the others, which *follow*.
"""
