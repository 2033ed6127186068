"""Drafts for speculative decoding: tokens that may come next, found without the model.

A drafter (:mod:`.drafter`) looks up what followed the longest earlier occurrence of a sequence's
last tokens (:mod:`.suffix_automaton`, :mod:`.ngram_index`). Its sources (:mod:`.sources`) are the
sequence itself, the output that the request predicts, and recent outputs of the same scope
(:mod:`.recent_outputs`). :mod:`.choice` decides how many drafts of which rows a step verifies, from
measured times (:mod:`.step_times`) and from how many were accepted before (:mod:`.acceptance`).
Nothing here changes a result: a draft that isn't the token that the model's own draw gives is
dropped.

Imported by ``cpu``.
"""
