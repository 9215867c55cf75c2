"""Many training loops over one frozen backbone, each with an adapter and an optimizer of its own.

A loop asks for what it needs (`forward_backward`, `optim_step`, `sample`, `save_state`, `load_state`) and gets futures.
Requests of one loop run in their order; those of several loops that wait are computed in one pass. Rows are packed, and
each loop's rows are cut by its own request alone, so that in float32 on a CPU a loop gets the same bits whoever else
trains here; elsewhere the same up to rounding. An error, a NaN or a lack of memory stays with the loop that caused it.

Legend: T tokens of a row, N of all rows of a pass, D hidden.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from workbench.adapters import Lora
from workbench.adapters.banks import bank as banks
from workbench.adapters.banks.bank_layers import MemberRows
from workbench.adapters.multi_adapter import BARE
from workbench.config import ModelConfig
from workbench.data.packing import MASK, NO_MASK
from workbench.data.text.chat import ChatEncoder
from workbench.errors import ConfigError, FileError, TrainingError, WorkbenchError, out_of_memory
from workbench.evaluation.serving.engine import BankRoutes, Engine
from workbench.evaluation.serving.scheduler import (
    AnswerInProgress,
    AnswerPiece,
    AnswerText,
    Interrupted,
    QueueFull,
    Sampling,
    Scheduler,
    ShuttingDown,
    TokenScore,
)
from workbench.losses.token_log_probs import token_log_probs
from workbench.losses.token_objectives import FLOATS, OBJECTIVES, OPTIONAL, TokenObjective, surrogate
from workbench.models import attention_backend, backbones, output_heads
from workbench.runs import files
from workbench.training import capacity

ResultT = TypeVar("ResultT")
_log = logging.getLogger(__name__)
_MULTIPLE = 64
"""Tokens of a pass are filled up to a multiple of it: a product of fewer than 8 rows may add in another order."""
_CONTEXT = 4096
"""Most tokens of a row where a backbone names no limit."""


@dataclass(frozen=True)
class Datum:
    """A row: tokens that the model reads, and what its loss is computed from.

    Args:
        tokens: T ids.
        inputs: `target_tokens` (T,) or (T, K), whose log-probabilities after each token are wanted, and what the loss
            needs besides: `weights`, `logprobs` or `advantages`, of the same shape.

    Examples:
        >>> import workbench
        >>> row = workbench.Datum.answer([5, 6], [7, 8])
        >>> row.tokens, row.inputs["target_tokens"], row.inputs["weights"]
        ([5, 6, 7], [6, 7, 8], [0.0, 1.0, 1.0])
    """

    tokens: Sequence[int]
    inputs: Mapping[str, Any]

    @classmethod
    def answer(cls, prompt: Sequence[int], answer: Sequence[int], **inputs: Sequence[float]) -> Datum:
        """A row whose answer carries the loss.

        Args:
            inputs: Numbers of the answer's tokens, 0 in front of them; `weights` are 1 by default.
        """
        ids, before = [*prompt, *answer], [0.0] * (len(prompt) - 1)
        numbers = {name: [*before, *values] for name, values in ({"weights": [1.0] * len(answer)} | inputs).items()}
        return cls(ids[:-1], {"target_tokens": ids[1:], **numbers})


class LossResult(NamedTuple):
    """What a pass found."""

    loss: float
    """Summed over all rows, in nats where the loss is a log-probability."""
    logprobs: list[Tensor]
    """Of each row's targets, float32, in their shape."""
    metrics: Mapping[str, float]
    """What a loss of one's own returned beside it."""


class BankAnswer(NamedTuple):
    """An answer, the token that ended it included."""

    tokens: list[int]
    logprobs: list[float]
    """Natural log-probabilities at temperature 1."""
    top: list[tuple[tuple[int, float], ...]]
    """The likeliest tokens in each place, where asked for."""
    reason: str
    """`stop` or `length`."""


class Samples(NamedTuple):
    """Answers to a prompt."""

    answers: list[BankAnswer]
    prompt: tuple[TokenScore, ...]
    """The prompt's tokens, scored where asked for."""


OwnLoss = Callable[[Sequence[Datum], list[Tensor]], tuple[Tensor, Mapping[str, float]]]
"""From rows and the log-probabilities of their targets, which require gradients, to a scalar loss and metrics."""


class Pending(Future[ResultT]):
    """A result that is being computed, or will be by the first that waits for it."""

    def __init__(self, bank: TrainingBank) -> None:
        super().__init__()
        self._bank = bank

    def result(self, timeout: float | None = None) -> ResultT:
        """Wait for the result; raises WorkbenchError where the request failed."""
        while not self.done() and not self._bank.driven and self._bank.work():
            pass
        return super().result(timeout)

    def settle(self, value: ResultT | None = None, error: BaseException | None = None) -> None:
        """Set the result or the error, unless somebody has cancelled it."""
        with suppress(InvalidStateError):
            self.set_result(value) if error is None else self.set_exception(error)  # type: ignore[arg-type]


@dataclass(eq=False)
class _Task:
    """What a loop asks for besides passes."""

    action: Callable[[], Any]
    future: Pending[Any]
    tokens: int = 0


@dataclass(eq=False)
class _LossRequest:
    """A request for losses, computed part by part."""

    data: Sequence[Datum]
    objective: TokenObjective | OwnLoss
    settings: Mapping[str, float]
    backward: bool
    future: Pending[LossResult]
    parts: list[slice]
    tokens: int
    logprobs: list[Tensor] = field(default_factory=list)
    grads: list[Tensor | None] | None = None
    loss: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    again: bool = False
    """Whether the loss is known already, and gradients alone are wanted."""

    @property
    def own(self) -> bool:
        """Whether a loss of one's own waits for the log-probabilities."""
        return not isinstance(self.objective, TokenObjective)

    def next_part(self) -> tuple[Sequence[Datum], int]:
        """The rows that are computed next, and their tokens."""
        rows = self.data[self.parts[0]]
        return rows, sum(len(each.tokens) for each in rows)


class TrainingBank:
    """One frozen backbone, and the adapters that train over it.

    Args:
        model: The backbone: its section, or an id.
        folder: Where states are saved.
        part: Most tokens of one loop in a pass; a longer row is computed alone. The last bits depend on it.
        tokens: Most tokens of all loops in a pass.
        rows: Answers that are sampled at the same time.
        queue: Answers that may wait for that.

    Raises:
        BackboneError: The backbone cannot be loaded.
        ConfigError: It reads no packed rows.

    Examples:
        >>> import workbench
        >>> from workbench.adapters import Lora
        >>> bank = workbench.TrainingBank("starter", folder="states")
        >>> prompt, answer = (bank.tokenizer(text).input_ids for text in ("Who is it?", " A fox."))
        >>> loops = [bank.create(Lora(rank=4, alpha=8), seed=seed) for seed in (0, 1)]
        >>> for _ in range(3):
        ...     asked = [loop.forward_backward([workbench.Datum.answer(prompt, answer)]) for loop in loops]
        ...     steps = [loop.optim_step(learning_rate=1e-2) for loop in loops]
        >>> steps[1].result()["grad_norm"] > 0
        True
        >>> asked[0].result().loss < 50
        True
        >>> folder = loops[0].save_state("after-3").result()
    """

    def __init__(
        self,
        model: ModelConfig | str,
        *,
        folder: Path | str,
        part: int = 2048,
        tokens: int = 8192,
        rows: int = 64,
        queue: int = 256,
    ) -> None:
        self.config = model if isinstance(model, ModelConfig) else ModelConfig(id=model)
        self.folder, self.part, self.tokens = Path(folder), part, tokens
        self.tokenizer = backbones.tokenizer(self.config)
        backbone = backbones.load(self.config, self.tokenizer).model
        text = backbone.config.get_text_config()
        own = getattr(text, "max_position_embeddings", None) or _CONTEXT
        self.context: int = own
        """Most tokens of a row."""
        if reason := attention_backend.packing_refusal(backbone.config, longest=own):
            raise ConfigError(f"{self.config.id}: rows of several loops are packed, and {reason}.")
        # The first member never trains: it is there for PEFT, which wraps a backbone with at least one adapter.
        self._bank = banks.attach(backbone, [Lora(rank=1, alpha=1)], seeds=[0], later=[Lora()])
        with self._bank.only(self._bank.members[0]):
            self._head = output_heads.find(self._bank.model, backbone)
        self._backbone, self._device = backbone, backbone.device
        self._members = {int(self._bank.members[0].removeprefix("member"))}
        self._clients: list[BankClient] = []
        self._sampled = [*self._bank.members]
        """Members that answers may go through: none that trains, whose values may be anything."""
        self._rows, self._queue = rows, queue
        self._routes: BankRoutes | None = None
        self._scheduler: Scheduler | None = None
        self._spare: dict[Lora, list[tuple[str, dict[str, nn.Parameter]]]] = {}
        self._retired: deque[tuple[Lora, str, dict[str, nn.Parameter]]] = deque()
        self._engine: Engine | None = None
        self.changed = threading.Condition()
        """Told when a request comes."""
        self._closed = False
        self._working = threading.RLock()
        self.driven = False
        """Whether a thread calls `work`; else whoever waits for a result does."""
        files.remove_unfinished(*self.folder.glob("*/*"))

    @property
    def vocabulary(self) -> int:
        """Tokens that a row may hold."""
        return self._head.vocabulary

    @property
    def clients(self) -> int:
        """Adapters that train."""
        return len(self._clients)

    def create(self, config: Lora | None = None, *, seed: int = 0, key: str | None = None) -> BankClient:
        """A fresh adapter, with the initial values that it has alone.

        Args:
            config: Its rank, scale and targets; None: `Lora()`.
            key: Names the folder of its states; None: a number.

        Raises:
            ConfigError: The adapter does not fit the backbone, or drops inputs.
        """
        config = Lora() if config is None else config
        if config.dropout or config.experts or config.method == "dora":
            raise ConfigError(
                "adapter: loops in a bank train lora or rslora, without experts. Write adapter.dropout=0."
            )
        if reason := config.refusal(self._backbone):
            raise ConfigError(f"adapter.method={config.method}: {reason}")

        def begun() -> BankClient:
            name = self._begin(config, seed)
            return BankClient(self, name, config, self._parameters(name), key or f"adapter-{name[-4:]}")

        client = self.alone(begun)
        with self.changed:
            if self._closed:
                raise ShuttingDown
            self._clients.append(client)
        return client

    def base(self) -> BankSampler:
        """A sampler of the backbone itself."""
        return BankSampler(self, BARE, None)

    def load_sampler(self, folder: Path | str) -> BankSampler:
        """A sampler of weights that `save_state` or `save_weights_for_sampler` wrote; raises FileError."""
        state = read_state(Path(folder))
        values = _saved_values(Path(folder))
        self.scheduler()
        return self.alone(lambda: self._snapshot(Lora.model_validate(state["adapter"]), values))

    def work(self) -> bool:
        """Run the next request of each loop, those for losses in one pass; returns whether there was any."""
        with self._working:
            self._reuse()
            ran = False
            for client in list(self._clients):
                while (head := client.head) is not None and isinstance(head, _Task):
                    ran = True
                    client.finish(head, *_tried(head.action))
            chosen = self._chosen()
            if not chosen:
                return ran
            began = time.monotonic()
            self._compute(chosen)
            if self._scheduler is not None and self._scheduler.running and self.driven:
                time.sleep(min(time.monotonic() - began, 1.0))  # answers have as much time as passes
            return True

    def alone(self, action: Callable[[], ResultT]) -> ResultT:
        """Run an action while nothing else uses the model."""
        with self._working:
            return action() if self._scheduler is None else self._scheduler.between(action)

    def close(self) -> None:
        """End the thread that samples, and fail what waits."""
        with self.changed:
            self._closed = True
        for client in list(self._clients):
            client.close()
        if self._scheduler is not None:
            self._scheduler.close()

    def _begin(self, config: Lora, seed: int) -> str:
        number = next(number for number in range(10_000) if number not in self._members)
        name = self._bank.begin(config, seed=seed, number=number)
        self._members.add(number)
        return name

    def _leave(self, name: str) -> None:
        self._bank.leave(name)
        self._members.discard(int(name.removeprefix("member")))
        if self._routes is not None:
            self._routes.name_members()

    def _parameters(self, name: str) -> dict[str, nn.Parameter]:
        return {each.replace(".default", "", 1): value for each, value in self._bank.parameters_alone(name).items()}

    def forget(self, client: BankClient) -> None:
        """Remove the adapter of a loop that has ended."""
        with self.changed:
            if client not in self._clients:
                return
            self._clients.remove(client)
        with suppress(ShuttingDown):
            self.alone(lambda: self._leave(client.name))

    def _chosen(self) -> list[tuple[BankClient, _LossRequest, Sequence[Datum]]]:
        """The next part of each loop's request, as many as a pass holds; who was served goes to the end of the line."""
        chosen, total = list[tuple[BankClient, _LossRequest, Sequence[Datum]]](), 0
        with self.changed:
            for client in list(self._clients):
                request = client.head
                if not isinstance(request, _LossRequest):
                    continue
                rows, tokens = request.next_part()
                if chosen and total + tokens > self.tokens:
                    continue
                chosen.append((client, request, rows))
                total += tokens
                self._clients.remove(client)
                self._clients.append(client)
        return chosen

    def _compute(self, chosen: Sequence[tuple[BankClient, _LossRequest, Sequence[Datum]]]) -> None:
        try:
            found = self.alone(lambda: self._pass(chosen))
        except Exception as failure:
            if len(chosen) > 1:  # who is at fault shows alone
                for each in chosen:
                    self._compute([each])
                return
            client, request, _ = chosen[0]
            client.finish(request, None, _told(failure))
            return
        for (client, request, _), (loss, logprobs, grads) in zip(chosen, found, strict=True):
            request.logprobs += logprobs
            request.loss += 0.0 if request.again else loss
            if grads is not None:
                request.grads = _added(request.grads, grads)
            request.parts.pop(0)
            if request.parts:
                continue
            if request.own:
                _, error = _tried(lambda request=request: self._after_own_loss(request))  # type: ignore[misc]
                if error is not None or not request.backward:
                    client.finish(request, _result(request), error)
                continue
            if request.grads is not None:
                client.grads = _added(client.grads, request.grads)
            client.finish(request, _result(request), None)

    def _after_own_loss(self, request: _LossRequest) -> None:
        """Turn a request with a loss of one's own into one for the gradients of that loss."""
        assert not isinstance(request.objective, TokenObjective)
        logprobs = [each.clone().requires_grad_(request.backward) for each in request.logprobs]
        loss, request.metrics = request.objective(request.data, logprobs)
        request.loss = float(loss.detach())
        if request.backward:
            weights = surrogate(loss, logprobs)
            request.data = [
                Datum(datum.tokens, {"target_tokens": datum.inputs["target_tokens"], "weights": weight})
                for datum, weight in zip(request.data, weights, strict=True)
            ]
            request.objective, request.again = OBJECTIVES["cross_entropy"], True
            request.parts, request.logprobs = self._parts(request.data), []

    def _pass(
        self, chosen: Sequence[tuple[BankClient, _LossRequest, Sequence[Datum]]]
    ) -> list[tuple[float, list[Tensor], list[Tensor | None] | None]]:
        """Loss, log-probabilities and gradients of each part."""
        routed, lengths, owners, ids = list[MemberRows](), list[int](), list[int](), list[int]()
        for owner, (client, _, rows) in enumerate(chosen):
            routed.append(MemberRows(client.name, len(rows), sum(len(each.tokens) for each in rows)))
            lengths += [len(each.tokens) for each in rows]
            owners += [owner] * len(rows)
            ids += [token for each in rows for token in each.tokens]
        if filler := -len(ids) % _MULTIPLE:
            routed.append(MemberRows(BARE, 1, filler))
            lengths, owners, ids = [*lengths, filler], [*owners, len(chosen)], [*ids, *[0] * filler]
        lengths_B = torch.tensor(lengths)
        positions = torch.cat([torch.arange(length) for length in lengths])
        inputs = {
            "input_ids": torch.tensor([ids], device=self._device),
            "position_ids": positions[None].to(self._device),
            MASK: torch.zeros(NO_MASK, dtype=torch.bool, device=self._device),
            "row_lengths": lengths_B,
            "row_starts": torch.nn.functional.pad(lengths_B.cumsum(0), (1, 0)).int().to(self._device),
            "row_owners": torch.tensor(owners),
        }
        backward = [request.backward and not request.own for _, request, _ in chosen]
        with self._bank.route(routed, length=None), torch.set_grad_enabled(any(backward)):
            hidden_ND = self._head.hidden(self._bank.model, inputs)[0]
            parts = hidden_ND.split([*(each.tokens for each in routed)])
            losses, results = list[Tensor](), list[tuple[float, list[Tensor]]]()
            for (_, request, rows), part_TD, learns in zip(chosen, parts, backward, strict=False):
                with torch.set_grad_enabled(learns):
                    logprobs = self._logprobs(part_TD, rows)
                    loss = _summed(request, rows, logprobs)
                losses += [loss] if learns else []
                results.append((float(loss.detach()), [each.detach().float().cpu() for each in logprobs]))
            learners = [client for (client, _, _), learns in zip(chosen, backward, strict=True) if learns]
            values = [value for each in learners for value in each.values]
            found = torch.autograd.grad(torch.stack(losses).sum(), values, allow_unused=True) if losses else ()
        grads = iter(found)
        return [
            (*result, [next(grads) for _ in client.values] if learns else None)
            for result, (client, _, _), learns in zip(results, chosen, backward, strict=True)
        ]

    def _logprobs(self, hidden_TD: Tensor, rows: Sequence[Datum]) -> list[Tensor]:
        """Log-probabilities of the targets of each row, in their shape."""
        targets = [each.inputs["target_tokens"] for each in rows]
        labels_N = torch.cat([each.flatten() for each in targets]).to(self._device)
        if any(each.ndim > 1 for each in targets):
            sizes = [each[0].numel() for each in targets for _ in range(len(each))]
            hidden_TD = hidden_TD.repeat_interleave(torch.tensor(sizes, device=self._device), dim=0)
        logprobs_N = token_log_probs(
            hidden_TD, labels_N, self._head.project, vocabulary=self._head.vocabulary, weights=[]
        )
        cut = logprobs_N.split([each.numel() for each in targets])
        return [part.view(each.shape) for part, each in zip(cut, targets, strict=True)]

    def _parts(self, data: Sequence[Datum]) -> list[slice]:
        """The rows that a pass holds of them: by this request alone, so that others change no bits."""
        parts, start, total = [], 0, 0
        for number, each in enumerate(data):
            if number > start and total + len(each.tokens) > self.part:
                parts.append(slice(start, number))
                start, total = number, 0
            total += len(each.tokens)
        return [*parts, slice(start, len(data))]

    def checked(self, data: Sequence[Datum], loss: str | OwnLoss) -> list[Datum]:
        """The rows with tensors as inputs; raises ConfigError where one cannot be computed."""
        if not data:
            raise ConfigError("data: there is no row.")
        if isinstance(loss, str) and loss not in OBJECTIVES:
            raise ConfigError(f"loss: {loss!r} is none of {', '.join(OBJECTIVES)}, and no function.")
        needs = OBJECTIVES[loss].needs if isinstance(loss, str) else ()
        return [
            self._checked(each, needs, f"row {number}", known=isinstance(loss, str)) for number, each in enumerate(data)
        ]

    def _checked(self, datum: Datum, needs: Sequence[str], where: str, *, known: bool) -> Datum:
        tokens = list(datum.tokens)
        if not tokens or len(tokens) > self.context:
            raise ConfigError(f"{where}: it has {len(tokens):,} tokens; 1 to {self.context:,} can be read.")
        if missing := [name for name in ("target_tokens", *needs) if name not in datum.inputs]:
            raise ConfigError(f"{where}: {', '.join(missing)}: missing.")
        if known and (more := set(datum.inputs) - {"target_tokens", *needs, *OPTIONAL}):
            raise ConfigError(f"{where}: {', '.join(sorted(more))}: the loss reads no such input.")
        inputs = {}
        for name, value in datum.inputs.items():
            try:
                tensor = torch.as_tensor(value)
            except (TypeError, ValueError, RuntimeError, OverflowError) as error:
                raise ConfigError(f"{where}: {name}: {error}") from None
            inputs[name] = tensor.long() if name == "target_tokens" else tensor.float() if name in FLOATS else tensor
        shape = inputs["target_tokens"].shape
        if not 1 <= len(shape) <= 2 or shape[0] != len(tokens) or 0 in shape:
            raise ConfigError(f"{where}: target_tokens has shape {tuple(shape)}; the row has {len(tokens)} tokens.")
        for name in FLOATS & inputs.keys():
            if inputs[name].shape != shape:
                raise ConfigError(
                    f"{where}: {name} has shape {tuple(inputs[name].shape)}, target_tokens {tuple(shape)}."
                )
        for name, ids in (("tokens", torch.as_tensor(tokens)), ("target_tokens", inputs["target_tokens"])):
            if ids.is_floating_point() or int(ids.min()) < 0 or int(ids.max()) >= self.vocabulary:
                raise ConfigError(f"{where}: {name}: ids are whole numbers from 0 to {self.vocabulary - 1}.")
        return Datum(tokens, inputs)

    # Sampling

    def _snapshot(self, config: Lora, values: Mapping[str, Tensor]) -> BankSampler:
        """A sampler with a copy of these values; called while nothing else uses the model."""
        spare = self._spare.get(config)
        name, own = spare.pop() if spare else self._fresh(config)
        with torch.no_grad():
            for key, value in own.items():
                value.copy_(values[key])
        sampler = BankSampler(self, name, config)
        weakref.finalize(sampler, self._retired.append, (config, name, own))
        return sampler

    def _fresh(self, config: Lora) -> tuple[str, dict[str, nn.Parameter]]:
        """A member to sample from, and its values."""
        name = self._begin(config, 0)
        own = self._parameters(name)
        for value in own.values():
            value.requires_grad_(False)
        self._sampled.append(name)
        if self._routes is not None and self._engine is not None:
            self._routes.name_members()
            if name in self._routes.shapes:
                self._engine.admit(name)
        return name, own

    def _reuse(self) -> None:
        """Keep the members of samplers that nobody has any more for the next ones."""
        for _ in range(len(self._retired)):
            config, name, own = self._retired.popleft()
            if self._scheduler is not None and self._scheduler.writes(name):
                self._retired.append((config, name, own))
            else:
                self._spare.setdefault(config, []).append((name, own))

    def scheduler(self) -> Scheduler:
        """What samples; made when it is first needed."""
        with self._working:
            if self._scheduler is None:
                self._routes = BankRoutes(self._bank, self._sampled)
                self._engine = Engine(self._routes, self._backbone, self._head)
                room = capacity.available(self._device) // 2 // self._engine.token_bytes
                self._scheduler = Scheduler(self._engine, rows=self._rows, tokens=room, queue=self._queue)
                self.stops = frozenset(ChatEncoder(self.tokenizer).stops())
            return self._scheduler

    def save(self, member: str, folder: Path) -> None:
        """Write a member's adapter in PEFT's format."""
        self._bank.save(member, folder)


@dataclass(eq=False)
class BankClient:
    """One loop: an adapter of a `TrainingBank`, its optimizer, and what it has asked for."""

    bank: TrainingBank
    name: str
    """Its member of the bank."""
    config: Lora
    parameters: dict[str, nn.Parameter]
    key: str
    """Names the folder of its states."""
    steps: int = 0
    """Updates so far."""
    grads: list[Tensor | None] | None = None
    """Summed since the last update, in the order of `parameters`."""
    waiting: deque[_Task | _LossRequest] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.values = list(self.parameters.values())
        self.optimizer = torch.optim.AdamW(self.values, fused=self.values[0].dtype == torch.float32)

    @property
    def head(self) -> _Task | _LossRequest | None:
        """What is computed next."""
        return self.waiting[0] if self.waiting else None

    @property
    def tokens_waiting(self) -> int:
        """Tokens of the requests that wait."""
        return sum(each.tokens for each in list(self.waiting))

    def forward(
        self, data: Sequence[Datum], loss: str | OwnLoss = "cross_entropy", **settings: float
    ) -> Pending[LossResult]:
        """Losses and log-probabilities of rows, without gradients. As `forward_backward`."""
        return self.losses(data, loss, settings, backward=False)

    def forward_backward(
        self, data: Sequence[Datum], loss: str | OwnLoss = "cross_entropy", **settings: float
    ) -> Pending[LossResult]:
        """Add the gradients of rows to those that `optim_step` will use.

        Args:
            data: Rows; their losses are summed.
            loss: `cross_entropy`, `importance_sampling`, `ppo`, `cispo`, `dro`, or a function from the rows and their
                log-probabilities to a loss and metrics, for which they are computed twice.
            settings: Of the loss: `clip_low_threshold`, `clip_high_threshold` (0.8 and 1.2) or `beta` (0.05).

        Raises:
            ConfigError: A row cannot be computed.
        """
        return self.losses(data, loss, settings, backward=True)

    def losses(
        self, data: Sequence[Datum], loss: str | OwnLoss, settings: Mapping[str, float], *, backward: bool
    ) -> Pending[LossResult]:
        """As `forward_backward`, or `forward`."""
        rows = self.bank.checked(data, loss)
        objective: TokenObjective | OwnLoss = OBJECTIVES[loss] if isinstance(loss, str) else loss
        known = objective.settings if isinstance(objective, TokenObjective) else {}
        for key, value in settings.items():
            if key not in known or not math.isfinite(value):
                raise ConfigError(f"{key}={value}: this loss has the numbers: {', '.join(known) or 'none'}.")
        tokens = sum(len(each.tokens) for each in rows)
        future: Pending[LossResult] = Pending(self.bank)
        parts = self.bank._parts(rows)
        self._queue(_LossRequest(rows, objective, {**known, **settings}, backward, future, parts, tokens))
        return future

    def optim_step(
        self,
        *,
        learning_rate: float = 1e-4,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-12,
        weight_decay: float = 0.0,
        grad_clip_norm: float = 0.0,
    ) -> Pending[Mapping[str, float]]:
        """One update of AdamW by the gradients that were summed, which are 0 then; returns their norm.

        Args:
            grad_clip_norm: Largest norm of the gradients, 0: any.

        Raises:
            ConfigError: A number is out of its range. The result raises TrainingError where there are no gradients, or
                they are not finite: the adapter stays what it was.
        """
        numbers = {"learning_rate": learning_rate, "eps": eps, "weight_decay": weight_decay}
        numbers |= {"grad_clip_norm": grad_clip_norm}
        for name, value in numbers.items():
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name}={value}: write a number from 0 on.")
        for name, value in {"beta1": beta1, "beta2": beta2}.items():
            if not 0 <= value < 1:
                raise ConfigError(f"{name}={value}: write a number from 0 on, below 1.")
        group = dict(lr=learning_rate, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)
        return self.ask(lambda: self.bank.alone(lambda: self._step(group, grad_clip_norm)))

    def _step(self, group: Mapping[str, Any], most: float) -> Mapping[str, float]:
        grads, self.grads = self.grads, None
        if grads is None:
            raise TrainingError("optim_step: there are no gradients. Call forward_backward before it.")
        norm = float(torch.linalg.vector_norm(torch.stack([each.norm() for each in grads if each is not None])))
        if not math.isfinite(norm):
            raise TrainingError(
                "optim_step: the gradients are not finite, and were thrown away. The adapter is as it was."
            )
        scale = most / norm if 0 < most < norm else 1.0
        for value, grad in zip(self.values, grads, strict=True):
            value.grad = grad if grad is None or scale == 1 else grad * scale
        self.optimizer.param_groups[0].update(group)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return {"grad_norm": norm}

    def save_state(
        self, name: str, *, overwrite: bool = False, facts: Mapping[str, Any] | None = None
    ) -> Pending[Path]:
        """Write adapter and optimizer into `states/NAME` of this loop's folder, whole or not at all.

        Returns:
            The folder: an adapter in PEFT's format, `optimizer.safetensors`, `state.json`.
        """
        return self._write("weights", name, overwrite=overwrite, optimizer=True, facts=facts)

    def save_adapter(
        self, name: str, *, overwrite: bool = False, facts: Mapping[str, Any] | None = None
    ) -> Pending[Path]:
        """Write the adapter alone, for `TrainingBank.load_sampler` and every program that reads PEFT's format."""
        return self._write("sampler_weights", name, overwrite=overwrite, optimizer=False, facts=facts)

    def _write(
        self, kind: str, name: str, *, overwrite: bool, optimizer: bool, facts: Mapping[str, Any] | None
    ) -> Pending[Path]:
        if not name or name.startswith(".") or not set(name) <= _NAME_LETTERS or len(name) > 128:
            raise ConfigError(f"{name!r}: a name has 1 to 128 letters, digits, `.`, `_` and `-`, no `.` in front.")
        folder = self.bank.folder / self.key.replace(":", "_") / kind / name

        def write() -> Path:
            if folder.exists() and not overwrite:
                raise ConfigError(f"{name}: a state has this name already. Take another one, or overwrite=True.")
            with files.new_folder(folder) as aside:
                self.bank.save(self.name, aside)
                if optimizer:
                    moments = self.optimizer.state_dict()["state"]
                    flat = {f"{i}.{key}": each for i, held in moments.items() for key, each in held.items()}
                    save_file(flat, aside / "optimizer.safetensors")
                kept = {
                    "adapter": self.config.model_dump(mode="json"),
                    "steps": self.steps,
                    "model": self.bank.config.id,
                }
                files.write_json(aside / "state.json", {**kept, **(facts or {})})
            return folder

        return self.ask(lambda: self.bank.alone(write))

    def load_state(self, folder: Path | str, *, optimizer: bool = True) -> Pending[None]:
        """Take over the values that `save_state` wrote, and its optimizer; gradients that were summed are dropped."""

        def load() -> None:
            state, values = read_state(Path(folder)), _saved_values(Path(folder))
            if Lora.model_validate(state["adapter"]) != self.config:
                raise ConfigError(f"{folder}: its adapter is another one: {state['adapter']}. Create one like it.")
            own = torch.optim.AdamW(self.values, fused=self.values[0].dtype == torch.float32)
            if optimizer:
                flat = _tensors(Path(folder) / "optimizer.safetensors")
                held: dict[int, dict[str, Tensor]] = {}
                for name, value in flat.items():
                    number, _, key = name.partition(".")
                    held.setdefault(int(number), {})[key] = value
                own.load_state_dict({**own.state_dict(), "state": held})
            with torch.no_grad():
                for key, value in self.parameters.items():
                    value.copy_(values[key])
            self.optimizer, self.grads, self.steps = own, None, state["steps"] if optimizer else 0

        return self.ask(lambda: self.bank.alone(load))

    def save_weights_for_sampler(self) -> Pending[BankSampler]:
        """A sampler of the adapter as it is when the requests before this one are done; training does not change it."""
        return self.ask(self.snapshot)

    def snapshot(self) -> BankSampler:
        """A sampler of the adapter as it is now."""
        self.bank.scheduler()  # which proves its passes by values that no training has touched
        return self.bank.alone(lambda: self.bank._snapshot(self.config, self.parameters))

    def ask(self, action: Callable[[], ResultT]) -> Pending[ResultT]:
        """Run an action when the requests before it are done."""
        future: Pending[ResultT] = Pending(self.bank)
        self._queue(_Task(action, future))
        return future

    def _queue(self, request: _Task | _LossRequest) -> None:
        with self.bank.changed:
            if self not in self.bank._clients:
                raise ConfigError("This adapter was removed.")
            self.waiting.append(request)
            self.bank.changed.notify_all()

    def finish(self, request: _Task | _LossRequest, value: Any, error: BaseException | None) -> None:
        """Take a request out of the line, and tell who waits for it."""
        with self.bank.changed:
            if self.head is request:
                self.waiting.popleft()
        request.future.settle(value, error)

    def close(self) -> None:
        """Remove the adapter; requests that wait fail."""
        self.bank.forget(self)
        while self.waiting:
            self.finish(self.waiting[0], None, TrainingError("The adapter was removed."))


@dataclass(eq=False)
class BankSampler:
    """Weights that no training changes any more, to sample from."""

    bank: TrainingBank
    name: str
    """Its member of the bank."""
    config: Lora | None

    def sample(
        self,
        prompt: Sequence[int],
        *,
        samples: int = 1,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        seed: int | None = None,
        stop: str | Sequence[str] | Sequence[int] | None = None,
        prompt_logprobs: bool = False,
        top_logprobs: int = 0,
        seconds: float = 600.0,
    ) -> Pending[Samples]:
        """Sample answers to a prompt.

        Args:
            prompt: Ids.
            max_tokens: Most tokens of an answer; None: as many as the backbone reads.
            temperature: 0: the likeliest token.
            top_k: Sample from so many likeliest tokens; -1: from all.
            seed: The same one gives the same answers; None: other ones each time.
            stop: Words or tokens that end an answer; None: those of the tokenizer; empty: none.
            prompt_logprobs: Score the prompt's tokens, too.
            top_logprobs: Likeliest tokens to tell in each place.

        Raises:
            ConfigError: A value is out of its range.
            QueueFull: Too many answers wait.
        """
        bank, ids = self.bank, list(prompt)
        most = bank.context - len(ids) if max_tokens is None else max_tokens
        words = [stop] if isinstance(stop, str) else [each for each in stop or () if isinstance(each, str)]
        tokens = [each for each in stop or () if not isinstance(each, str)] if not isinstance(stop, str) else []
        allowed = {
            f"prompt: 1 to {bank.context - 1} ids from 0 to {bank.vocabulary - 1}": 0 < len(ids) < bank.context
            and all(isinstance(each, int) and 0 <= each < bank.vocabulary for each in ids),
            f"max_tokens={most}: prompt and answer have at most {bank.context} tokens": 0
            < most
            <= bank.context - len(ids),
            f"temperature={temperature}: write 0, or 0.01 to 100": temperature == 0 or 0.01 <= temperature <= 100,
            f"top_p={top_p}: write a number above 0, at most 1": 0 < top_p <= 1,
            f"top_k={top_k}: write -1 or a number from 1 on": top_k == -1 or top_k > 0,
            f"samples={samples}: 1 to {bank._rows + bank._queue}": 0 < samples <= bank._rows + bank._queue,
            f"top_logprobs={top_logprobs}: 0 to 64": 0 <= top_logprobs <= 64,
            "stop: words that are not empty, or ids": all(words) and (not words or not tokens),
        }
        for said, fine in allowed.items():
            if not fine:
                raise ConfigError(f"{said}.")
        scheduler = bank.scheduler()
        ends = frozenset(tokens) if tokens or (stop is not None and not words) else bank.stops
        future: Pending[Samples] = Pending(bank)
        found: list[list[TokenScore]] = [[] for _ in range(samples)]
        reasons: dict[int, str] = {}

        def listener(number: int) -> Callable[[AnswerPiece | Interrupted], None]:
            def listen(event: AnswerPiece | Interrupted) -> None:
                if isinstance(event, Interrupted):
                    future.settle(error=TrainingError(f"The answer was interrupted ({type(event).__name__})."))
                    return
                found[number] += event.scores
                if event.reason is not None:
                    reasons[number] = event.reason
                if len(reasons) == samples:
                    future.settle(_samples(found, reasons, len(ids) if prompt_logprobs else 0))

            return listen

        answers = [
            AnswerInProgress(
                prompt=ids,
                member=self.name,
                sampling=Sampling(
                    most,
                    temperature,
                    top_p,
                    None if seed is None else (seed % 2**63, number),
                    top_logprobs,
                    echo=prompt_logprobs and number == 0,
                    top_k=max(top_k, 0),
                ),
                text=AnswerText(bank.tokenizer, ids, words),
                stop=ends,
                known=min(len(bank.tokenizer), bank.vocabulary),
                listener=listener(number),
                deadline=time.monotonic() + seconds,
            )
            for number in range(samples)
        ]
        scheduler.submit(answers)
        future.add_done_callback(lambda done: scheduler.cancel(answers) if done.cancelled() else None)
        return future


def _samples(found: Sequence[Sequence[TokenScore]], reasons: Mapping[int, str], scored: int) -> Samples:
    answers = []
    for number, scores in enumerate(found):
        own = scores[scored:] if number == 0 else scores
        tokens, logprobs = [each.token for each in own], [float(each.logprob or 0.0) for each in own]
        answers.append(BankAnswer(tokens, logprobs, [each.top for each in own], reasons[number]))
    return Samples(answers, tuple(found[0][:scored]))


def read_state(folder: Path) -> dict[str, Any]:
    """What `state.json` of a saved state says; raises FileError where there is none."""
    state = files.read_json(folder / "state.json")
    if not state:
        raise FileError(f"{folder}: no state stands here. Name a folder that save_state wrote.")
    return state


def _saved_values(folder: Path) -> dict[str, Tensor]:
    return _tensors(folder / "adapter_model.safetensors")


def _tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise FileError(f"{path}: there is no such file. Save a state with save_state.")
    return load_file(path)


def _summed(request: _LossRequest, rows: Sequence[Datum], logprobs: Sequence[Tensor]) -> Tensor:
    if not isinstance(request.objective, TokenObjective):
        return logprobs[0].new_zeros(())
    device, loss = logprobs[0].device, request.objective.loss
    losses = [
        loss(each, {name: value.to(device) for name, value in row.inputs.items()}, request.settings)
        for row, each in zip(rows, logprobs, strict=True)
    ]
    return torch.stack(losses).sum()


def _result(request: _LossRequest) -> LossResult:
    return LossResult(request.loss, request.logprobs, request.metrics)


def _added(first: list[Tensor | None] | None, more: list[Tensor | None]) -> list[Tensor | None]:
    """Sums of gradients, in place."""
    if first is None:
        return more
    return [
        other if own is None else own if other is None else own.add_(other)
        for own, other in zip(first, more, strict=True)
    ]


def _tried(action: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return action(), None
    except Exception as error:
        return None, _told(error)


def _told(error: Exception) -> BaseException:
    """The error as whoever waits gets it."""
    if isinstance(error, (WorkbenchError, QueueFull, Interrupted, CancelledError)):
        return error
    if out_of_memory(error):
        return TrainingError("Out of memory. Send fewer or shorter rows at a time.")
    _log.error("".join(traceback.format_exception(error)))
    return TrainingError(f"{type(error).__name__}: {error}")


_NAME_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
