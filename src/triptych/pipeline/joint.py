"""The passes of stage 2 in order, from the joint graph to its halves. A comment says why a step runs at its point."""

from __future__ import annotations

from ..joint.auto_chunker import AutoChunker
from ..joint.canonicalize_aten_ir_passes import CanonicalizeAtenIrPasses
from ..joint.constant_fold_uniform_value import ConstantFoldUniformValue
from ..joint.freeze import Freeze
from ..joint.keep_overwritten import KeepOverwrittenPass
from ..joint.pad_mm import PadMmPass
from ..joint.pass_patterns import PassPatterns
from ..joint.recompute_between_products import RecomputeBetweenProductsPass
from ..joint.remove_noop_ops import RemoveNoopOps
from ..joint.replace_random_passes import ReplaceRandomPasses
from ..options import ADD_RULES
from ..post_grad.compute_masks_again import ComputeMasksAgainPass
from ..rules.stable_topological_sort import StableTopologicalSort
from .entries import Entry, Hook

FREEZE: list[Entry] = [Freeze]
"""Runs with the option `freeze`, in inference: before the joint stage, so that its passes no longer see computations on
weights alone, and again after the joint and the post-grad stage, for such computations that their passes added."""

JOINT: list[Entry] = [
    CanonicalizeAtenIrPasses,  # first: rules then match one order of operands and non-negative dims
    Hook("joint_custom_pre_pass"),
    RemoveNoopOps,
    ConstantFoldUniformValue,
    Hook("joint_custom_pre_pass"),  # again, over the folded graph
    Hook(ADD_RULES),
    PassPatterns,
    AutoChunker,  # after the patterns, which rewrite the loss; before products are padded, as each chunk has its own
    PadMmPass,  # after `bmm_to_mm`, which leaves fewer batched products to pad
    ReplaceRandomPasses,  # after the patterns, which match random operations by torch's names
    Hook("joint_custom_post_pass"),
    StableTopologicalSort,
]

BEFORE_PARTITION: list[Entry] = [
    KeepOverwrittenPass,
    RecomputeBetweenProductsPass,  # last: it looks at what the backward reads
]

AFTER_PARTITION: list[Entry] = [ComputeMasksAgainPass]
"""Run on the forward graph together with its backward graph."""
