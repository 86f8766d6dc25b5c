"""Checks what tokens are generated from, and how."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from penstock.errors import GenerationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.models.generation.generator import Generator


class Sampling(NamedTuple):
    """How a token is chosen.

    Attributes:
        temperature: what logits are divided by; 0 for the most probable token.
        top_k: how many of the most probable tokens are considered; None for all.
        top_p: the tokens considered are the most probable ones that together have this probability; None for all.
        seed: of the random numbers.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0


class Request(NamedTuple):
    """What tokens are generated from, and how: the same on all ranks.

    Attributes:
        prompts: the prompts, padded on the left.
        mask: which of their tokens count.
        shifts: by how many places each prompt was moved to the right for that.
        new: how many tokens are generated at most.
        sampling: how they are chosen.
        ends: the tokens that end a sequence.
        padding: what follows them.
        microbatches: how many microbatches the sequences are divided into.
    """

    prompts: torch.Tensor
    mask: torch.Tensor
    shifts: torch.Tensor
    new: int
    sampling: Sampling
    ends: tuple[int, ...]
    padding: int
    microbatches: int

    def facts(self) -> dict[str, str]:
        """What must be the same on all ranks, by the name of the argument."""
        return {
            "input_ids": _digest(self.prompts),
            "attention_mask": _digest(self.mask),
            "max_new_tokens": str(self.new),
            **{name: str(value) for name, value in self.sampling._asdict().items()},
            "eos_token_id": str(self.ends),
            "pad_token_id": str(self.padding),
            "microbatches": str(self.microbatches),
        }


def make_request(
    generator: Generator,
    ranks: int,
    input_ids: Any,
    attention_mask: Any,
    max_new_tokens: Any,
    sampling: Sampling,
    eos_token_id: int | Sequence[int] | None,
    pad_token_id: int | None,
    microbatches: int | None,
) -> Request:
    """Check the arguments of ``generate``, and fill in those that are left to the model."""
    ids = _checked_ids(input_ids, generator.vocabulary)
    ends = generator.ends if eos_token_id is None else _tokens("eos_token_id", eos_token_id)
    padding = generator.padding if pad_token_id is None else _whole("pad_token_id", pad_token_id, least=0)
    mask = _checked_mask(attention_mask, ids, padding, ends)
    new = _whole("max_new_tokens", max_new_tokens)
    if generator.longest is not None and ids.shape[1] + new > generator.longest:
        raise GenerationError(
            f"prompts of {ids.shape[1]} tokens and max_new_tokens={new} need more than the {generator.longest} "
            f"positions that the model has; generate at most {max(generator.longest - ids.shape[1], 0)}"
        )
    if padding is None:
        if ends:
            padding = ends[0]
        elif not mask.all():
            raise GenerationError("the prompts are padded, but the model has no token for padding; pass pad_token_id=")
        else:
            padding = 0  # nothing is padded
    shifts = mask.flip(1).long().argmax(1)
    return Request(
        _shift(ids, shifts),
        _shift(mask, shifts),
        shifts,
        new,
        _checked_sampling(sampling),
        ends,
        padding,
        min(ids.shape[0], ranks if microbatches is None else _whole("microbatches", microbatches)),
    )


def _checked_ids(ids: Any, vocabulary: int) -> torch.Tensor:
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or not ids.numel() or ids.dtype not in _WHOLE_NUMBERS:
        raise GenerationError(
            f"input_ids must be whole numbers of the shape [sequences, tokens], not {_describe(ids)}; add a dimension "
            "to a single prompt: input_ids[None]"
        )
    numbers: torch.Tensor = ids.detach().long()
    if (unknown := numbers[(numbers < 0) | (numbers >= vocabulary)]).numel():
        raise GenerationError(f"input_ids has the token {int(unknown[0])}, but the model knows 0 to {vocabulary - 1}")
    return numbers


def _checked_mask(mask: Any, ids: torch.Tensor, padding: int | None, ends: Sequence[int]) -> torch.Tensor:
    """Return which tokens count; without a mask, padding is recognized by its token, unless that ends a sequence."""
    if mask is None:
        is_known = padding is not None and padding not in ends
        found = ids.ne(padding or 0) if is_known else torch.ones_like(ids, dtype=torch.bool)
    elif isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
        found = mask.detach().to(ids.device).bool()
    else:
        raise GenerationError(
            f"attention_mask must have the shape of input_ids, {list(ids.shape)}, but is {_describe(mask)}"
        )
    begins = (found[:, 1:] & ~found[:, :-1]).sum(1) + found[:, 0]  # how many runs of tokens there are
    for wrong, what in ((begins == 0, "has no token"), (begins > 1, "has padding between its tokens")):
        if wrong.any():
            by = f"the tokens that equal pad_token_id={padding}" if mask is None else "its attention_mask"
            raise GenerationError(
                f"the prompt of sequence {int(wrong.nonzero()[0])} {what}, by {by}; pass an attention_mask= with the "
                "padding on the left or on the right"
            )
    return found


def _shift(tensor: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
    """Move each row to the right, so that the padding on its right goes to its left."""
    places = torch.arange(tensor.shape[1], device=tensor.device) - shifts[:, None]
    return tensor.gather(1, places % tensor.shape[1])


def _checked_sampling(given: Sampling) -> Sampling:
    temperature, top_k, top_p, seed = given
    if not _is_number(temperature) or not 0 <= temperature < math.inf:
        raise GenerationError(f"temperature must be a number of at least 0, not {temperature!r}; 0 does not sample")
    if temperature == 0 and (top_k is not None or top_p is not None):
        raise GenerationError("top_k= and top_p= choose among samples; pass a temperature above 0 as well")
    if top_p is not None and (not _is_number(top_p) or not 0 < top_p <= 1):
        raise GenerationError(f"top_p must be above 0 and at most 1, not {top_p!r}")
    return Sampling(
        float(temperature),
        None if top_k is None else _whole("top_k", top_k),
        None if top_p is None else float(top_p),
        _whole("seed", seed, least=0, most=2**63 - 1),
    )


_WHOLE_NUMBERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _whole(name: str, value: Any, *, least: int = 1, most: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        raise GenerationError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return value


def _tokens(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, int | list | tuple):
        raise GenerationError(f"{name} must be a token or a list of tokens, not {value!r}")
    return tuple(_whole(name, one, least=0) for one in ((value,) if isinstance(value, int) else value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} of the shape {list(value.shape)}"
    return f"a {type(value).__name__}"


def _digest(tensor: torch.Tensor) -> str:
    data = str(list(tensor.shape)).encode() + tensor.cpu().contiguous().numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]
