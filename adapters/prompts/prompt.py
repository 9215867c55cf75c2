"""Prompt tuning and P-tuning: trainable embeddings before each row, on HF PEFT's prompt and p-tuning encoders.

Beside the patches of a picture the tokens are ours: visual prompt tuning.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from workbench.adapters import anatomy
from workbench.adapters.method import ExtraParameters, MethodInfo, Sample, register
from workbench.adapters.prompts.virtual_tokens import NO_MERGE, VirtualTokens, embedding_width
from workbench.schema import Unit

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import PreTrainedModel

_facts = partial(
    MethodInfo,
    no_merge=NO_MERGE,
    no_freezing="what it trains stands before the first layer, or in all of them",
    no_packing="each row begins with virtual tokens of its own",
    starts_elsewhere="the text sees the virtual tokens from the start",
)


class _SoftPrompt(VirtualTokens):
    """Base of the methods whose virtual tokens enter with the embeddings."""

    def modules(self, model: PreTrainedModel) -> list[str]:
        """The embedding, before whose rows the virtual tokens stand; for pictures the kind of block that reads them."""
        if anatomy.reads_pictures(model):
            return sorted({type(model.get_submodule(path)).__name__ for path in anatomy.blocks(model)[0]})
        embedding = model.get_input_embeddings()
        return [name.rsplit(".", 1)[-1] for name, module in model.named_modules() if module is embedding]


@register
class Prompt(_SoftPrompt):
    """Embeddings of virtual tokens, trained as they are.

    Beside the patches of a picture they are visual prompts (Jia et al. 2022, arXiv:2203.12119), with the paper's
    uniform initial values whatever `init` says.

    They need far higher learning rates than LoRA: try train.learning_rate=0.03, or 0.3 with init=random.
    """

    about: ClassVar[dict[str, MethodInfo]] = {
        "prompt": _facts(
            trains="embeddings of virtual tokens before each row",
            paper="Lester et al. 2021, arXiv:2104.08691",
        )
    }
    method: Literal["prompt"] = "prompt"
    init: Literal["vocabulary", "random", "text"] = "vocabulary"
    """Initial embeddings: those of random tokens, normal noise as wide as the vocabulary's, or those of a text."""
    depth: Literal["shallow", "deep"] = "shallow"
    """Pictures: tokens enter before the first block (shallow), or each block reads tokens of its own (deep)."""
    text: str | None = Field(default=None, min_length=1)
    """Text of init=text, such as the task in words; repeated where it is shorter than `virtual_tokens`."""

    @model_validator(mode="after")
    def _text_where_it_is_read(self) -> Prompt:
        if (self.text is not None) != (self.init == "text"):
            raise ValueError("adapter.text goes with adapter.init=text, and only with it. Write both, or neither.")
        return self

    def refusal(self, model: PreTrainedModel) -> str | None:
        """Refuse a text that is longer than the virtual tokens, and would be cut; and pictures without patches."""
        if anatomy.reads_pictures(model):
            from workbench.adapters.prompts.visual_prompt_tuner import token_width

            if self.text is not None:
                return "adapter.init=text is for rows of text. Write adapter.init=random, without adapter.text."
            if token_width(model) is None:
                return (
                    f"the blocks of {type(model).__name__} read no sequence of patches to which tokens can be added. "
                    "Use adapter.method=lora."
                )
            return None
        if self.depth == "deep":
            return "deep prompts are for pictures. Write adapter.method=p-tuning-v2, which has tokens in every layer."
        reason = super().refusal(model)
        if reason or self.text is None:
            return reason
        from transformers import AutoTokenizer

        count = len(AutoTokenizer.from_pretrained(model.config._name_or_path)(self.text)["input_ids"])  # as in PEFT
        if count > self.virtual_tokens:
            return (
                f"adapter.text has {count} tokens, more than adapter.virtual_tokens={self.virtual_tokens}. "
                f"Write adapter.virtual_tokens={count}, or a shorter text."
            )
        return None

    def to_peft(self, model: PreTrainedModel, beside: ExtraParameters) -> PeftConfig:
        """PEFT's PromptTuningConfig for this backbone; for pictures the configuration of our tuner."""
        from peft import PromptTuningConfig, PromptTuningInit

        if anatomy.reads_pictures(model):
            from workbench.adapters.anatomy import picture_stem
            from workbench.adapters.prompts.visual_prompt_tuner import VisualPromptConfig, token_width

            width = token_width(model)
            assert width is not None, "require_fit comes first"
            return VisualPromptConfig(
                task_type=anatomy.task(model),
                virtual_tokens=self.virtual_tokens,
                width=width,
                patch=int(picture_stem(model).kernel_size[0]),
                deep=self.depth == "deep",
                blocks=anatomy.blocks(model)[0],
                modules_to_save=beside.heads or None,
            )

        kinds = {
            "vocabulary": PromptTuningInit.SAMPLE_VOCAB,
            "random": PromptTuningInit.RANDOM,
            "text": PromptTuningInit.TEXT,
        }
        return PromptTuningConfig(
            task_type=anatomy.task(model),
            num_virtual_tokens=self.virtual_tokens,
            token_dim=embedding_width(model),
            num_transformer_submodules=1,  # PEFT would train as many for T5's decoder, and never use them
            prompt_tuning_init=kinds[self.init],
            prompt_tuning_init_text=self.text,
            tokenizer_name_or_path=model.config._name_or_path if self.init == "text" else None,
        )

    def initialise(self, model: PeftModel, sample: Sample | None) -> None:
        """Draw noise as wide as the vocabulary's embeddings; PEFT's has a deviation of 1, often fifty times theirs."""
        import torch

        if self.init == "random" and not anatomy.reads_pictures(model.get_base_model()):
            inside: Any = model
            with torch.no_grad():
                spread = inside.word_embeddings.weight.float().std()
                inside.prompt_encoder[model.active_adapter].embedding.weight.mul_(spread)


@register
class PTuning(_SoftPrompt):
    """Embeddings of virtual tokens, computed by a small network that is dropped when training ends.

    Try train.learning_rate=0.01.
    """

    about: ClassVar[dict[str, MethodInfo]] = {
        "p-tuning": _facts(
            trains="a network that computes embeddings of virtual tokens",
            paper="Liu et al. 2021, arXiv:2103.10385",
        )
    }
    method: Literal["p-tuning"] = "p-tuning"
    encoder: Literal["mlp", "lstm"] = "mlp"
    """The network: three linear layers, or a bidirectional LSTM of two layers and two linear ones."""
    encoder_width: Annotated[PositiveInt | None, Unit("hidden units")] = None
    """Width of the network's hidden layers; null: that of the backbone."""

    def to_peft(self, model: PreTrainedModel, beside: ExtraParameters) -> PeftConfig:
        """PEFT's PromptEncoderConfig for this backbone."""
        from peft import PromptEncoderConfig

        return PromptEncoderConfig(
            task_type=anatomy.task(model),
            num_virtual_tokens=self.virtual_tokens,
            token_dim=embedding_width(model),
            num_transformer_submodules=1,  # PEFT would train as many for T5's decoder, and never use them
            encoder_reparameterization_type=self.encoder.upper(),
            encoder_hidden_size=self.encoder_width,  # type: ignore[arg-type]  # PEFT's own default is None
        )
