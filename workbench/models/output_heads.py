"""The output head of a language model, split from its body so that only supervised positions are projected.

Of some families the last block, too, is computed at supervised positions alone, where nothing else reads its output.
Its keys and values are those of all tokens; queries, the output of attention and the MLP, some five sixths of the
block's products, are computed for the positions whose next token carries loss, and are what they would be otherwise.

Legend: B rows, L padded tokens of each, N supervised positions, M chosen tokens, Q queries of a row, D hidden, V
vocabulary, H heads of queries, K of keys, E width of a head.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from workbench.adapters import anatomy
from workbench.adapters.banks.bank_layers import Routed, RoutedLora
from workbench.adapters.updates.lora_start_values import Shift
from workbench.errors import BackboneError

LAST_BLOCK_FAMILIES = ("gemma", "granite", "llama", "mistral", "qwen2", "qwen3")
"""Architectures (`model_type`) whose last block is computed here as transformers computes it."""
MOST_POSITIONS = 0.9  # largest share of supervised tokens for which selecting them costs less than it saves
_AS_IT_IS = ContextVar("as_it_is", default=False)
STRETCH = 16
"""The number of queries per row is padded to a multiple of this: oneDNN compiles a product for every number."""


class RowQueries(NamedTuple):
    """The chosen tokens as queries (B, Q) of their rows, padded."""

    column_BQ: Tensor  # place of each query in its row
    token_BQ: Tensor  # flat index of each query among the chosen tokens
    slot_M: Tensor  # flat index into B * Q of each chosen token


@dataclass
class Narrowing:
    """The tokens of a micro-batch that the last block computes."""

    shape: tuple[int, int]
    """B and L of the block's input; 1 and all tokens where rows are packed."""
    places: Tensor
    """Flat indices into B * L of the chosen tokens, (1, M), or (B, Q) where every row has the same number."""
    slots_N: Tensor | None
    """Index among the chosen tokens of each supervised position; None: they are the same."""
    queries: RowQueries | None = None
    """None: queries are computed for all tokens."""
    applied: bool = False
    """Whether the block has computed the chosen tokens alone."""

    def of(self, hidden_BLD: Tensor) -> Tensor:
        """The chosen tokens (..., D), as `places` has them, of all (B, L, D)."""
        return hidden_BLD.flatten(0, 1).index_select(0, self.places.flatten()).view(*self.places.shape, -1)


@contextmanager
def whole_last_block(condition: bool) -> Iterator[None]:
    """Inside, where `condition` holds, last blocks compute all positions: for a plan of devices that shard weights."""
    token = _AS_IT_IS.set(condition or _AS_IT_IS.get())
    try:
        yield
    finally:
        _AS_IT_IS.reset(token)


def last_block_of(backbone: PreTrainedModel) -> nn.Module | None:
    """The last block of a backbone of LAST_BLOCK_FAMILIES; None for others."""
    if _AS_IT_IS.get() or backbone.config.get_text_config().model_type not in LAST_BLOCK_FAMILIES:
        return None
    blocks = anatomy.decoder_layers(backbone)
    return blocks[-1] if blocks else None


@contextmanager
def last_block_narrowed(
    block: nn.Module | None, positions_N: Tensor, ids_BL: Tensor, *, packed: bool
) -> Iterator[Narrowing | None]:
    """Inside, the block computes only what `positions_N` need; yields None where it computes everything.

    With activation checkpointing, this block keeps its activations: the backward pass would begin by recomputing them.

    Args:
        block: From `last_block_of`.
        positions_N: Flat indices into B * L.
        packed: Whether rows lie one after another in one sequence.
    """
    narrowing = None
    if block is not None and _plain(block):
        by_member = any(isinstance(each, RoutedLora) for each in block.modules())
        narrowing = _chosen(positions_N, ids_BL, packed=packed, by_member=by_member)
    if narrowing is None:
        yield None
        return
    own: Any = block
    checkpointing = getattr(own, "gradient_checkpointing", False)
    own.gradient_checkpointing = False
    own.forward = partial(_narrowed_forward, own, narrowing)
    try:
        yield narrowing
    finally:
        del own.__dict__["forward"]
        own.gradient_checkpointing = checkpointing


def _chosen(positions_N: Tensor, ids_BL: Tensor, *, packed: bool, by_member: bool) -> Narrowing | None:
    """The tokens to compute; None where nearly all are needed, or where counting would synchronise with a device.
    `by_member`: whether layers need the same number of tokens in each row, as those of a bank do."""
    rows, length = ids_BL.shape
    if not 0 < len(positions_N) <= MOST_POSITIONS * rows * length:
        return None
    if packed or positions_N.device.type != "cpu":  # counts per row are on the device
        return None if by_member else Narrowing((rows, length), positions_N[None], None)
    kept_M, number_N = positions_N.unique(return_inverse=True)
    row_M = kept_M // length
    count_B = row_M.bincount(minlength=rows)
    most = min(length, -(-int(count_B.max()) // STRETCH) * STRETCH)
    slot_M = row_M * most + torch.arange(len(kept_M)) - (count_B.cumsum(0) - count_B)[row_M]
    token_BQ = torch.zeros(rows, most, dtype=torch.long)
    token_BQ.view(-1)[slot_M] = torch.arange(len(kept_M))
    if not by_member:
        queries = RowQueries(kept_M[token_BQ] % length, token_BQ, slot_M)
        return Narrowing((rows, length), kept_M[None], number_N, queries)
    if most > MOST_POSITIONS * length:
        return None
    places_BQ = (torch.arange(rows) * length)[:, None].repeat(1, most)
    places_BQ.view(-1)[slot_M] = kept_M
    alike = torch.arange(rows * most)
    queries = RowQueries(places_BQ % length, alike.view(rows, most), alike)
    return Narrowing((rows, length), places_BQ, slot_M[number_N], queries)


def _plain(block: Any) -> bool:
    """Whether the block is its family's own, computes each token by itself, and nobody else reads its outputs."""
    attention: Any = block.self_attn
    own = type(block).__module__ == type(attention).__module__ and hasattr(_code(attention), "apply_rotary_pos_emb")
    if not own or attention.config._attn_implementation != "sdpa" or (block.training and attention.attention_dropout):
        return False
    parts: tuple[nn.Module, ...] = (block, attention, block.mlp)
    for part in parts:
        read = part._forward_hooks.keys() - part._forward_hooks_always_called.keys()  # a plan's clean-up hooks
        if read or "forward" in part.__dict__ or part._compiled_call_impl is not None:
            return False
    return all(_by_token(each) for each in block.modules())


def _by_token(module: nn.Module) -> bool:
    """Whether a layer's result for a token does not depend on the other tokens and their number."""
    if isinstance(module, Routed) and module.own:
        return False
    if isinstance(module, BaseTunerLayer):
        variants = getattr(module, "lora_variant", {}).values()
        return isinstance(module, LoraLayer) and all(isinstance(each, Shift) for each in variants)
    if isinstance(module, nn.Dropout):
        return not (module.training and module.p)
    return type(module).__name__ != "Linear8bitLt"  # where outliers of one token affect all


def _narrowed_forward(
    block: Any,
    narrowing: Narrowing,
    hidden_BLD: Tensor,
    *,
    attention_mask: Tensor | None = None,
    position_embeddings: tuple[Tensor, Tensor],
    past_key_values: Any = None,
    **settings: Any,
) -> Tensor:
    """The block's forward pass: (..., D) of the chosen tokens, or of all where the input is not the batch's."""
    settings |= {"attention_mask": attention_mask, "position_embeddings": position_embeddings}
    if past_key_values is not None or tuple(hidden_BLD.shape[:2]) != narrowing.shape or settings.get("sequence"):
        whole: Tensor = type(block).forward(block, hidden_BLD, past_key_values=past_key_values, **settings)
        return whole
    narrowing.applied = True
    factor = getattr(block, "residual_multiplier", 1.0)  # Granite

    def added(residual: Tensor, update: Tensor) -> Tensor:
        return residual + (update if factor == 1 else update * factor)

    attended = _narrowed_attention(block.self_attn, block.input_layernorm(hidden_BLD), narrowing, **settings)
    hidden = added(narrowing.of(hidden_BLD), attended)
    return added(hidden, block.mlp(block.post_attention_layernorm(hidden)))


def _narrowed_attention(
    attention: Any,
    hidden_BLD: Tensor,
    narrowing: Narrowing,
    *,
    attention_mask: Tensor | None,
    position_embeddings: tuple[Tensor, Tensor],
    **settings: Any,
) -> Tensor:
    """The output of attention (..., D) at the chosen tokens, which see the tokens before them in their rows."""
    rows, queries, rotate = narrowing.shape[0], narrowing.queries, _code(attention).apply_rotary_pos_emb

    def heads(name: str, hidden: Tensor) -> Tensor:
        parts: Tensor = getattr(attention, f"{name}_proj")(hidden).view(*hidden.shape[:2], -1, attention.head_dim)
        norm = getattr(attention, f"{name}_norm", None)  # Qwen 3
        parts = parts if norm is None else norm(parts)
        return parts.transpose(1, 2)

    query = heads("q", hidden_BLD if queries is None else narrowing.of(hidden_BLD))
    key_BKLE, value_BKLE = heads("k", hidden_BLD), heads("v", hidden_BLD)
    cos, sin = position_embeddings
    key_BKLE = rotate(key_BKLE[:, :0], key_BKLE, cos, sin)[1]
    if queries is not None:
        cos, sin = (narrowing.of(each.expand(rows, -1, -1)) for each in (cos, sin))
        attention_mask = _seen(attention_mask, narrowing.shape, queries.column_BQ)
    query = rotate(query, query[:, :0], cos, sin)[0]
    if queries is not None:
        query_MHE = query.transpose(1, 2).flatten(0, 1)
        query = (
            query_MHE.index_select(0, queries.token_BQ.flatten()).unflatten(0, queries.token_BQ.shape).transpose(1, 2)
        )
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    attended, _ = attend(attention, query, key_BKLE, value_BKLE, attention_mask, scaling=attention.scaling, **settings)
    flat = attended.flatten(2)
    chosen = narrowing.of(flat) if queries is None else flat.flatten(0, 1).index_select(0, queries.slot_M)
    output: Tensor = attention.o_proj(chosen.view(*narrowing.places.shape, -1))
    return output


def _seen(attention_mask: Tensor | None, shape: tuple[int, int], column_BQ: Tensor) -> Tensor:
    """Mask of the chosen queries (B, 1, Q, L); causal where there is no mask."""
    rows, length = shape
    if attention_mask is None:
        return torch.le(torch.arange(length), column_BQ[..., None])[:, None]
    return attention_mask.expand(rows, 1, length, length)[torch.arange(rows)[:, None], 0, column_BQ][:, None]


def _code(attention: nn.Module) -> Any:
    """The Python module that defines a family's attention."""
    return sys.modules[type(attention).__module__]


@dataclass(frozen=True)
class Head:
    """Runs a model up to its output head, and the head alone.

    The whole model is called, and a hook catches the head's input: so nothing is assumed about a family's body, and
    methods that change the inputs (prompts, prefixes) work.
    """

    module: nn.Module
    vocabulary: int  # V, the head's rows
    width: int  # D, the hidden size
    softcap: float | None
    multiplier: float
    bias_1V: Tensor | None = None  # bias that the model adds to the logits after the head
    settings: Mapping[str, bool] = field(default_factory=dict)  # arguments of the model besides its inputs
    last_block: nn.Module | None = None  # see `workbench.models.output_heads`; None: it computes all positions

    def trainable(self) -> list[Tensor]:
        """The head's trainable tensors: none, unless the backbone or added token rows train."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def hidden(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        """Hidden states (B, L, D) before the head, of the decoder where there is one.

        Causal models and decoders need no attention mask, as rows are padded on the right.
        """
        return self._caught(model, inputs)[:, -_predicting(inputs).shape[1] :]

    def supervised(self, model: nn.Module, inputs: Mapping[str, Tensor], positions_N: Tensor) -> Tensor:
        """Hidden states (N, D) before the head, at flat indices into B * L; the last block may skip other positions."""
        ids_BL, packed = _predicting(inputs), "row_lengths" in inputs
        with last_block_narrowed(self.last_block, positions_N, ids_BL, packed=packed) as narrowing:
            hidden = self._caught(model, inputs)
        if narrowing is None or not narrowing.applied:
            return hidden[:, -ids_BL.shape[1] :].flatten(0, 1)[positions_N]
        return hidden.flatten(0, 1) if narrowing.slots_N is None else hidden.flatten(0, 1)[narrowing.slots_N]

    def _caught(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        """The input of the head, caught by a hook."""
        caught: list[Tensor] = []

        def catch(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Tensor]:
            caught.append(arguments[0])
            return (arguments[0][:, :0],)

        handle = self.module.register_forward_pre_hook(catch)
        try:
            model(**inputs, **self.settings)
        finally:
            handle.remove()
        return caught[0]

    def project(self, hidden: Tensor) -> Tensor:
        """Logits (..., V) of hidden states (..., D), as the model itself would compute them."""
        logits: Tensor = self.module(hidden) * self.multiplier if self.multiplier != 1 else self.module(hidden)
        logits = logits if self.bias_1V is None else logits + self.bias_1V
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits


def known(backbone: PreTrainedModel) -> Head:
    """The head as the configuration of `backbone` describes it, unchecked."""
    config = backbone.config.get_text_config(decoder=True)
    divisor = getattr(config, "logits_scaling", None) or 1.0  # Granite
    module = backbone.get_output_embeddings()
    weight = module.weight
    assert isinstance(weight, Tensor)
    return Head(
        module=module,
        vocabulary=weight.shape[0],
        width=weight.shape[1],
        softcap=getattr(config, "final_logit_softcapping", None),  # Gemma 2 and later
        multiplier=(getattr(config, "logit_scale", None) or 1.0) / divisor,  # Cohere
        bias_1V=dict(backbone.named_buffers()).get("final_logits_bias"),  # Marian; zeros in BART
        settings={"use_cache": False} if backbone.can_generate() else {},
        last_block=last_block_of(backbone),
    )


def find(model: nn.Module, backbone: PreTrainedModel) -> Head:
    """The output head of a language model, checked: body and head apart must give the logits of the model.

    Args:
        model: The backbone, with an adapter around it or not.
        backbone: The same without the adapter around it.

    Returns:
        The head. `supervised(model, batch.inputs, batch.positions_N)` gives hidden states (N, D) of the positions whose
        next token carries loss, and `project` their logits (N, V).

    Raises:
        BackboneError: They do not, so the family changes its logits in an unknown way; or a model that generates text
            sees the tokens that it should predict.

    Examples:
        >>> import numpy, workbench
        >>> from workbench.config import ModelConfig
        >>> section = ModelConfig(id="starter", weights="float32")
        >>> tokenizer = workbench.load_tokenizer(section)
        >>> backbone = workbench.load_backbone(section, tokenizer)
        >>> rows = workbench.encode_rows([{"question": "Who?", "answer": "A fox."}], tokenizer)
        >>> batch = rows.batch(numpy.arange(1))
        >>> head = workbench.output_head(backbone.model, backbone.model)
        >>> hidden_ND = head.supervised(backbone.model, batch.inputs, batch.positions_N)
        >>> head.project(hidden_ND).shape == (len(batch.labels_N), head.vocabulary)
        True
    """
    head, generates = known(backbone), backbone.can_generate()
    if isinstance(next(backbone.parameters()), FakeTensor):
        return head  # a plan has no values to check
    ids_BL = torch.arange(2, 6, device=backbone.device)[None] % head.vocabulary
    inputs = anatomy.trial_inputs(backbone) if anatomy.reads_sound(backbone) else {"input_ids": ids_BL}
    if backbone.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids_BL
    training = model.training
    model.eval()
    with torch.no_grad():
        wanted = model(**inputs, **head.settings).logits[:, -ids_BL.shape[1] :]  # virtual tokens come before
        head_logits = head.project(head.hidden(model, inputs)).to(wanted.dtype)  # Mamba's own are always float32
    looks_right = generates and _looks_right(head, model, backbone, inputs)
    model.train(training)
    if not torch.allclose(head_logits, wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max())):
        raise BackboneError(
            f"{type(backbone).__name__}: its logits are not those of its output head alone, so its loss cannot be "
            "computed in chunks. Please report this family; another backbone works today."
        )
    if looks_right:
        raise BackboneError(
            f"{type(backbone).__name__} is no causal language model: each position sees the tokens after it, so that "
            "it would learn to copy them. Take a backbone that generates text."
        )
    return head


def _predicting(inputs: Mapping[str, Tensor]) -> Tensor:
    """The tokens (B, L) at whose positions logits are predicted."""
    return inputs["decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"]


def _looks_right(head: Head, model: nn.Module, backbone: PreTrainedModel, inputs: Mapping[str, Tensor]) -> bool:
    """Whether the first position depends on later ones; if not, the gradients are exact zeros."""
    embedded: list[Tensor] = []

    def catch(_: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1].clone()  # bodies may scale it in place

    decoder = backbone.get_decoder() if backbone.config.is_encoder_decoder else backbone
    handle = decoder.get_input_embeddings().register_forward_hook(catch)
    try:
        with torch.enable_grad():
            first_D = head.hidden(model, inputs)[0, 0]
            weights_D = torch.arange(len(first_D), device=first_D.device, dtype=first_D.dtype)
            # An encoder may share the embedding; its part comes before the decoder's.
            (grad_BLD,) = torch.autograd.grad((first_D * weights_D).sum(), embedded[-1:])
    finally:
        handle.remove()
    return bool(grad_BLD[:, 1:].any())
