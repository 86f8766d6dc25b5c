"""Writes a plan for Primus: one of the schedules that it generates for its Megatron backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.planning.frameworks.megatron import layout_of
from penstock.planning.frameworks.settings import Settings, explain, nearest

if TYPE_CHECKING:
    from penstock.planning.frameworks.settings import Request

#: What Primus calls the schedules.
ALGORITHMS: Final = {
    "1F1B": "1f1b",
    "Interleaved1F1B": "1f1b-interleaved",
    "ZB-H1": "zero-bubble",
    "ZBVZeroBubble": "zbv-formatted",
    "V-Half": "v-half",
    "V-Min": "v-min",
}
#: What Primus asks to be set with its pipeline.
_REQUIRED: Final = (
    "overlap_grad_reduce: false",
    "overlap_param_gather: false",
    "no_persist_layer_norm: true",
    "create_attention_mask_in_dataloader: false",
    "gradient_accumulation_fusion: true",
)


def settings(request: Request) -> Settings:
    """Write the overrides as YAML."""
    ranks, microbatches = request.schedule.ranks, request.schedule.microbatches
    possible = [name for name in ALGORITHMS if name != "Interleaved1F1B" or microbatches % ranks == 0]
    chosen = nearest(request, possible)
    notes = explain(request, chosen, "Primus reads no custom schedule")
    stages_per_rank = chosen.schedule.stages // ranks
    is_loop = chosen.schedule.placement.rank_of == tuple(stage % ranks for stage in range(chosen.schedule.stages))
    lines = [f"pipeline_model_parallel_size: {ranks}"]
    if chosen.names is not None and is_loop:
        lines.append(f'pipeline_model_parallel_layout: "{layout_of(chosen.names)}"')
    elif stages_per_rank > 1:
        lines.append(f"num_virtual_stages_per_pipeline_rank: {stages_per_rank}")
    if chosen.names is not None and not is_loop:
        notes += (
            "a layout describes stages in a loop, so a V is cut evenly: the value holds only if the stages of the plan "
            "are even, too",
        )
    if chosen.names is None:
        notes += (
            "the names of modules are unknown, so the model is cut evenly, and the value holds only if the stages of "
            "the plan are even, too; pass names=",
        )
    lines += ["patch_primus_pipeline: true", f'pp_algorithm: "{ALGORITHMS[chosen.name]}"', *_REQUIRED]
    text = "\n".join([*lines, ""])
    notes += (
        f"the global batch size must be {microbatches} times the micro batch size and the number of data-parallel "
        "ranks",
        "the value is that of penstock's schedule of the same name; that of Primus may differ in details",
    )
    return Settings("primus", text, {"primus.yaml": text}, notes, chosen.schedule, chosen.value, request.planned)
