"""Lossless speculative decoding: target model, KV cache, drafts, acceptance rules, loop, evaluation.

Independent of any drafter: uses only tokens, probabilities, KV caches and the `Proposer` protocol.

Legend for shape comments, the same in every file: B rows, T positions, n new slots, S = N + 1
slots of a round (slot 0 is the root, slot i + 1 is node i), N draft nodes, M selected entries,
D hidden size, L tapped layers, V vocabulary, K draft depth.
"""
