"""`workbench serve BACKBONE --train`: a `TrainingBank` behind the HTTP interface of the Tinker SDK.

A request is answered by the name of a result at once, for which the client asks until it is there. Requests of a model
run in the order of their numbers, whatever order they come in; a request that comes twice is computed once.

Sessions, models, samplers, results and states belong to the key that made them: for any other there are none.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import re
import struct
import threading
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from workbench.adapters import Lora
from workbench.errors import ConfigError, TrainingError, WorkbenchError
from workbench.evaluation.serving import tinker_wire as wire
from workbench.evaluation.serving.scheduler import Interrupted, QueueFull
from workbench.evaluation.serving.training_bank import BankClient, BankSampler, TrainingBank, read_state
from workbench.models import backbones
from workbench.runs.http_server import LOOPBACK, TooLarge, body_of, without_port

_log = logging.getLogger(__name__)
CallT = TypeVar("CallT", bound=BaseModel)
_ALPHA = 32.0
"""Of the update's scale alpha / rank, as the interface has it."""
_PATH = re.compile(r"tinker://([A-Za-z0-9:_-]{1,200})/(weights|sampler_weights)/([A-Za-z0-9_-][A-Za-z0-9._-]{0,127})")
_NAME = re.compile(r"[A-Za-z0-9:_-]{1,200}")
_TARGETS: Mapping[tuple[bool, bool], Literal["attention", "mlp", "all-linear"]] = {
    (True, True): "all-linear",
    (False, True): "attention",
    (True, False): "mlp",
}


@dataclass(frozen=True)
class TrainingLimits:
    """Limits of a server for its clients."""

    api_keys: tuple[str, ...] = ()
    """Keys that are let in, each with data of its own; none: any key, from this machine alone."""
    adapters: int = 64
    """Most adapters that train at the same time."""
    rank: int = 256
    """Highest rank of an adapter."""
    queue: int = 64
    """Most requests of a model that wait."""
    tokens: int = 2**18
    """Most tokens of all requests of a key that wait."""
    samplers: int = 2
    """Weights of a model, and saved ones of a session, that can be sampled from; the oldest are forgotten."""
    results: int = 1024
    """Results of a key that are kept for clients that ask again."""
    body_bytes: int = 8 * 2**20
    """Largest size of a request."""
    body_seconds: float = 30.0
    """Seconds in which a request must have come."""
    poll_seconds: float = 20.0
    """Seconds after which a client that waits for a result is told to ask again."""
    idle_seconds: float = 600.0
    """Seconds without a sign of life after which a session makes room for others."""


class RequestRefused(Exception):
    """A request that is answered with an error."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.response = JSONResponse({"error": message, "detail": message}, status)


@dataclass(eq=False)
class _Promise:
    """A result that a client may ask for."""

    future: Future[Any]
    encode: Callable[[Any], Response]


@dataclass(eq=False)
class _Model:
    client: BankClient
    session: str
    following: int = 1
    """Number of the request that runs next."""
    held: dict[int, tuple[Callable[[], None], Future[Any]]] = field(default_factory=dict)
    """Requests that came before their turn, and their results."""


@dataclass(eq=False)
class _Sampler:
    weights: BankSampler
    path: str | None
    of: str
    """The model whose weights they are, or the session that took saved ones."""


@dataclass(eq=False)
class _Owner:
    """What belongs to a key."""

    name: str
    seen: dict[str, float] = field(default_factory=dict)
    """Sessions, and when each was heard of last."""
    models: dict[str, _Model] = field(default_factory=dict)
    samplers: OrderedDict[str, _Sampler] = field(default_factory=OrderedDict)
    promises: OrderedDict[str, _Promise] = field(default_factory=OrderedDict)
    tokens: Counter[str] = field(default_factory=Counter)
    """Tokens that were trained on, only read, and sampled."""


class TrainingServer:
    """Answers requests of the Tinker SDK over a bank."""

    def __init__(self, bank: TrainingBank, limits: TrainingLimits | None = None) -> None:
        self._bank, self._limits = bank, limits or TrainingLimits()
        self._owners: dict[str, _Owner] = {}
        self._closing = False
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="models")
        bank.driven = True
        self._worker = threading.Thread(target=self._work, name="training", daemon=True)

    @property
    def app(self) -> Starlette:
        """The application."""
        calls = {
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "create_model": self._create_model,
            "get_info": self._info,
            "forward_backward": self._losses,
            "optim_step": self._step,
            "save_weights": self._save,
            "save_weights_for_sampler": self._save_for_sampler,
            "load_weights": self._load,
            "weights_info": self._weights_info,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
            "cancel_future": self._cancel,
        }
        fixed: dict[str, dict[str, Any]] = {
            "client/config": {"use_pyqwest_transport": False, "parallel_fwdbwd_chunks": True},
            "client/dynamic_config": {"sample_cancel_enabled": True},
            "telemetry": {"status": "accepted"},
        }
        routes = [Route(f"/api/v1/{name}", self._open(call), methods=["POST"]) for name, call in calls.items()]
        for name, said in fixed.items():
            routes.append(Route(f"/api/v1/{name}", self._open(_saying(said)), methods=["POST"]))
        reads = {
            "get_server_capabilities": self._capabilities,
            "healthz": _saying({"status": "ok"}),
            "usage": self._usage,
            "samplers/{name}": self._sampler,
            "training_runs/{name}/checkpoints": self._checkpoints,
        }
        routes += [Route(f"/api/v1/{name}", self._open(call), methods=["GET"]) for name, call in reads.items()]
        routes.append(Route("/api/v1/sessions/{name}/finish", self._open(self._finish), methods=["POST"]))
        handlers: Any = {HTTPException: _unknown, Exception: _failed}
        return Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._worker.start()
        try:
            yield
        finally:
            with self._bank.changed:
                self._closing = True
                self._bank.changed.notify_all()
            await asyncio.to_thread(self._worker.join)
            await asyncio.to_thread(self._bank.close)
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _work(self) -> None:
        bank = self._bank
        while True:
            with bank.changed:
                bank.changed.wait_for(lambda: self._closing or any(each.head for each in bank._clients))
                if self._closing:
                    return
            try:
                bank.work()
            except Exception as error:
                _log.error("A pass failed", exc_info=error)
            time.sleep(0.001)  # whoever wants an adapter or a sampler gets its turn

    def _open(self, answer: Callable[[Request, _Owner], Any]) -> Any:
        """`answer` behind the check of permission, with errors as JSON."""

        async def guarded(request: Request) -> Response:
            try:
                found: Response = await answer(request, self._owner(request))
                return found
            except RequestRefused as refused:
                return refused.response
            except QueueFull:
                return RequestRefused("Too many requests wait. Ask again later.", status=429).response
            except ConfigError as error:
                return RequestRefused(str(error)).response
            except WorkbenchError as error:
                return RequestRefused(str(error), status=404).response
            except Interrupted:
                return RequestRefused("The server shuts down.", status=503).response
            except ClientDisconnect:
                return Response(status_code=499)

        return guarded

    def _owner(self, request: Request) -> _Owner:
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        key = request.headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")
        if self._limits.api_keys:
            if not any([hmac.compare_digest(key.encode(), each.encode()) for each in self._limits.api_keys]):
                raise RequestRefused("Wrong or no API key. Send it as X-API-Key.", status=401)
        else:
            origin = request.headers.get("origin", "").rpartition("//")[2]
            for name in (request.headers.get("host", ""), origin):
                if name and without_port(name) not in LOOPBACK:
                    raise RequestRefused(f"{name} is not answered without an API key. Ask 127.0.0.1.", status=403)
        name = hashlib.sha256(key.encode()).hexdigest()
        if name not in self._owners and len(self._owners) >= 4096:
            raise RequestRefused("Too many keys.", status=429)
        return self._owners.setdefault(name, _Owner(name))

    async def _body(self, request: Request) -> bytes:
        most, seconds = self._limits.body_bytes, self._limits.body_seconds
        try:
            return await asyncio.wait_for(body_of(request, most=most), seconds)
        except TimeoutError:
            raise RequestRefused(f"The request has not come in {seconds:g} seconds.", status=413) from None
        except TooLarge:
            raise RequestRefused(f"The request has more than {most:,} bytes.", status=413) from None

    async def _read(self, request: Request, kind: type[CallT]) -> CallT:
        try:
            return kind.model_validate(json.loads(await self._body(request)))
        except ValidationError as error:
            raise RequestRefused(_mistakes(error)) from None
        except (ValueError, RecursionError) as error:
            raise RequestRefused(f"The body is no JSON: {error}") from None

    # Sessions and models

    async def _create_session(self, _: Request, owner: _Owner) -> Response:
        if len(owner.seen) >= 1024:
            self._sweep()
        if len(owner.seen) >= 1024:
            raise RequestRefused("Too many sessions of this key.", status=429)
        session = str(uuid.uuid4())
        owner.seen[session] = time.monotonic()
        told = f"{self._bank.config.id} trains here; train_unembed is read as False: the output head has no adapter."
        return JSONResponse({"type": "create_session", "session_id": session, "info_message": told})

    def _session(self, owner: _Owner, session: str) -> str:
        if session not in owner.seen:
            raise RequestRefused(f"No session is called {session}.", status=404)
        owner.seen[session] = time.monotonic()
        return session

    async def _heartbeat(self, request: Request, owner: _Owner) -> Response:
        self._session(owner, (await self._read(request, wire.SessionCall)).session_id)
        return JSONResponse({"type": "session_heartbeat"})

    async def _finish(self, request: Request, owner: _Owner) -> Response:
        session = self._session(owner, request.path_params["name"])
        await asyncio.to_thread(self._forget, owner, session)
        return JSONResponse({})

    def _forget(self, owner: _Owner, session: str) -> None:
        """Remove the models and samplers of a session."""
        owner.seen.pop(session, None)
        for name in [name for name, each in list(owner.models.items()) if each.session == session]:
            model = owner.models.pop(name)
            model.client.close()
            while model.held:  # their turn never comes
                model.held.popitem()[1][1].set_exception(TrainingError("The adapter was removed."))
        for name in [name for name in list(owner.samplers) if name.startswith(f"{session}:")]:
            owner.samplers.pop(name, None)

    def _sweep(self) -> None:
        """Remove sessions that nobody has asked for long."""
        oldest = time.monotonic() - self._limits.idle_seconds
        for owner in list(self._owners.values()):
            for session in [each for each, seen in list(owner.seen.items()) if seen < oldest]:
                self._forget(owner, session)

    async def _create_model(self, request: Request, owner: _Owner) -> Response:
        call = await self._read(request, wire.CreateCall)
        session = self._session(owner, call.session_id)
        self._require_base(call.base_model)
        lora = call.lora_config
        if lora is None:
            raise RequestRefused("lora_config: this server trains LoRA adapters alone.")
        if (targets := _TARGETS.get((lora.train_mlp, lora.train_attn))) is None:
            raise RequestRefused("lora_config: nothing would train. Write train_mlp or train_attn.")
        seed = uuid.uuid4().int % 2**31 if lora.seed is None else lora.seed
        name = f"{session}:train:{call.model_seq_id}"
        config = Lora(rank=lora.rank, alpha=_ALPHA, targets=targets)
        said = _json({"type": "create_model", "model_id": name})
        return self._promised(owner, f"{name}:0", lambda: self._made(owner, session, name, config, seed), said)

    def _made(self, owner: _Owner, session: str, name: str, config: Lora, seed: int) -> _Model:
        if config.rank > self._limits.rank:
            raise ConfigError(f"lora_config.rank={config.rank}: at most {self._limits.rank}.")
        if self._bank.clients >= self._limits.adapters:
            self._sweep()
        if self._bank.clients >= self._limits.adapters:
            raise ConfigError(f"{self._limits.adapters} adapters train already. Finish a session, or come later.")
        model = _Model(self._bank.create(config, seed=seed, key=name), session)
        owner.models[name] = model
        return model

    def _require_base(self, name: str | None) -> None:
        if name != self._bank.config.id:
            raise RequestRefused(f"base_model {name!r} is not served. Write {self._bank.config.id!r}.")

    def _model(self, owner: _Owner, name: str) -> _Model:
        if (model := owner.models.get(name)) is None:
            raise RequestRefused(f"No model is called {name}.", status=404)
        owner.seen[model.session] = time.monotonic()
        return model

    async def _info(self, request: Request, owner: _Owner) -> Response:
        call = await self._read(request, wire.ModelCall)
        model = self._model(owner, call.model_id)
        base = self._bank.config.id
        local = backbones.folder_of(self._bank.config)
        data = {"arch": "", "model_name": base, "tokenizer_id": str(local) if local.is_dir() else base}
        said = {"type": "get_info", "model_id": call.model_id, "model_name": base, "is_lora": True, "model_data": data}
        return JSONResponse({**said, "lora_rank": model.client.config.rank})

    # Results

    def _promised(
        self, owner: _Owner, name: str, make: Callable[[], Any], encode: Callable[[Any], Response]
    ) -> Response:
        """Make something in a thread, and tell the name of the result."""
        if name not in owner.promises:
            self._keep(owner, name, _Promise(self._threads.submit(make), encode))
        return JSONResponse({"request_id": name})

    def _keep(self, owner: _Owner, name: str, promise: _Promise) -> None:
        owner.promises[name] = promise
        if len(owner.promises) > self._limits.results:
            for old in [key for key, each in owner.promises.items() if each.future.done()][: len(owner.promises) // 4]:
                del owner.promises[old]

    async def _retrieve(self, request: Request, owner: _Owner) -> Response:
        name = (await self._read(request, wire.FutureCall)).request_id
        if (promise := owner.promises.get(name)) is None:
            raise RequestRefused(f"No result is called {name}.", status=404)
        try:
            value = await asyncio.wait_for(
                asyncio.shield(asyncio.wrap_future(promise.future)), self._limits.poll_seconds
            )
        except TimeoutError:
            again = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return JSONResponse(again, 408)
        except (WorkbenchError, RequestRefused, QueueFull) as error:
            return JSONResponse({"error": str(error), "category": "user"})
        except Exception as error:
            if not promise.future.cancelled():
                _log.error("A request failed", exc_info=error)
            return JSONResponse({"error": "The server failed, and has noted why.", "category": "server"})
        except asyncio.CancelledError:
            if promise.future.cancelled():
                return JSONResponse({"error": "The request was cancelled.", "category": "user"})
            raise
        return promise.encode(value)

    async def _cancel(self, request: Request, owner: _Owner) -> Response:
        promise = owner.promises.get((await self._read(request, wire.FutureCall)).request_id)
        if promise is not None and isinstance(promise.encode, _Sampled):
            promise.future.cancel()
        return JSONResponse({})

    def _in_turn(
        self,
        owner: _Owner,
        model_id: str,
        number: int,
        ask: Callable[[BankClient], Future[Any]],
        encode: Callable[[Any], Response],
        *,
        tokens: int = 0,
    ) -> Response:
        """Ask the bank when the requests before this one have been asked."""
        model, name = self._model(owner, model_id), f"{model_id}:{number}"
        if name in owner.promises:
            return JSONResponse({"request_id": name})
        if number < model.following:
            raise RequestRefused(f"seq_id {number}: this model is at {model.following} already.")
        if len(model.held) + len(model.client.waiting) >= self._limits.queue:
            raise RequestRefused("Too many requests of this model wait. Ask again later.", status=429)
        waiting = sum(each.client.tokens_waiting for each in list(owner.models.values()))
        if waiting and waiting + tokens > self._limits.tokens:
            raise RequestRefused("Too many tokens of this key wait. Ask again later.", status=429)
        future: Future[Any] = Future()
        self._keep(owner, name, _Promise(future, encode))

        def run() -> None:
            try:
                _passed_on(ask(model.client), future)
            except Exception as error:
                future.set_exception(error)

        model.held[number] = run, future
        while (now := model.held.pop(model.following, None)) is not None:
            model.following += 1
            now[0]()
        return JSONResponse({"request_id": name})

    # Training

    async def _losses(self, request: Request, owner: _Owner) -> Response:
        body = await self._body(request)
        try:
            call = await asyncio.to_thread(wire.loss_call, body)
        except ValidationError as error:
            raise RequestRefused(_mistakes(error)) from None
        except (ValueError, TypeError, OverflowError, struct.error) as error:
            raise RequestRefused(f"The body is no ForwardBackwardRequest: {error}") from None
        tokens = sum(len(each.tokens) for each in call.data)

        def ask(client: BankClient) -> Future[Any]:
            found = client.losses(call.data, call.loss, call.settings, backward=not call.forward_only)
            owner.tokens["read" if call.forward_only else "trained"] += tokens
            return found

        def encode(result: Any) -> Response:
            return _proto(wire.loss_response(result))

        return self._in_turn(owner, call.model_id, call.seq_id, ask, encode, tokens=tokens)

    async def _step(self, request: Request, owner: _Owner) -> Response:
        call = await self._read(request, wire.OptimCall)

        def encode(found: Mapping[str, float]) -> Response:
            return JSONResponse({"metrics": {f"{name}:mean": value for name, value in found.items()}})

        return self._in_turn(
            owner, call.model_id, call.seq_id, lambda client: client.optim_step(**call.params.model_dump()), encode
        )

    # States

    async def _save(self, request: Request, owner: _Owner) -> Response:
        call = await self._read(request, wire.SaveCall)
        name = call.path or f"step-{uuid.uuid4().hex[:8]}"
        path = f"tinker://{call.model_id}/weights/{name}"
        facts = {"owner": owner.name}

        def ask(client: BankClient) -> Future[Any]:
            return client.save_state(name, overwrite=call.overwrite, facts=facts)

        return self._in_turn(owner, call.model_id, call.seq_id, ask, _json({"type": "save_weights", "path": path}))

    async def _save_for_sampler(self, request: Request, owner: _Owner) -> Response:
        call = await self._read(request, wire.SaveCall)
        said: dict[str, Any] = {"type": "save_weights_for_sampler"}
        if call.path is not None:
            path = call.path

            def write(client: BankClient) -> Future[Any]:
                return client.save_adapter(path, overwrite=call.overwrite, facts={"owner": owner.name})

            said |= {"path": f"tinker://{call.model_id}/sampler_weights/{path}"}
            return self._in_turn(owner, call.model_id, call.seq_id, write, _json(said))
        session = self._model(owner, call.model_id).session
        name = f"{session}:sample:{call.sampling_session_seq_id}"

        def snapshot(client: BankClient) -> Future[Any]:
            return client.ask(lambda: self._add_sampler(owner, name, client.snapshot(), None, of=call.model_id))

        said |= {"sampling_session_id": name}
        return self._in_turn(owner, call.model_id, call.seq_id, snapshot, _json(said))

    def _folder(self, owner: _Owner, path: str) -> Path:
        """The folder of a state of this owner."""
        found = _PATH.fullmatch(path)
        if found is None:
            raise RequestRefused(f"path {path[:100]!r}: write tinker://MODEL/weights/NAME.")
        folder = self._bank.folder / found[1].replace(":", "_") / found[2] / found[3]
        if not (folder / "state.json").is_file() or read_state(folder).get("owner") != owner.name:
            raise RequestRefused(f"{path}: no such state.", status=404)
        return folder

    async def _load(self, request: Request, owner: _Owner) -> Response:
        call = await self._read(request, wire.LoadCall)
        folder = self._folder(owner, call.path)
        if call.model_id is not None and call.seq_id is not None:
            said = {"type": "load_weights", "path": call.path, "model_id": call.model_id}
            return self._in_turn(
                owner,
                call.model_id,
                call.seq_id,
                lambda client: client.load_state(folder, optimizer=call.optimizer),
                _json(said),
            )
        if call.session_id is None or call.model_seq_id is None:
            raise RequestRefused("load_weights: name model_id and seq_id, or session_id and model_seq_id.")
        session = self._session(owner, call.session_id)
        name = f"{session}:train:{call.model_seq_id}"
        config = Lora.model_validate(read_state(folder)["adapter"])

        def made() -> None:
            model = self._made(owner, session, name, config, 0)
            model.client.load_state(folder, optimizer=call.optimizer).result()

        said = {"type": "load_weights", "path": call.path, "model_id": name}
        return self._promised(owner, f"{name}:0", made, _json(said))

    async def _weights_info(self, request: Request, owner: _Owner) -> Response:
        try:
            path = json.loads(await self._body(request))["tinker_path"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise RequestRefused("weights_info: write tinker_path.") from None
        state = read_state(self._folder(owner, str(path)))
        return JSONResponse({"base_model": state["model"], "is_lora": True, "lora_rank": state["adapter"]["rank"]})

    async def _checkpoints(self, request: Request, owner: _Owner) -> Response:
        name, found = request.path_params["name"], []
        if _NAME.fullmatch(name) is None:
            raise RequestRefused("No model has such a name.", status=404)
        for kind, said in (("weights", "training"), ("sampler_weights", "sampler")):
            for file in sorted((self._bank.folder / name.replace(":", "_") / kind).glob("[!.]*/state.json")):
                if read_state(file.parent).get("owner") == owner.name:
                    own = f"{kind}/{file.parent.name}"
                    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(file.stat().st_mtime))
                    size = sum(each.stat().st_size for each in file.parent.iterdir())
                    path = f"tinker://{name}/{own}"
                    about = {"checkpoint_id": own, "checkpoint_type": said, "time": stamp}
                    found.append({**about, "tinker_path": path, "size_bytes": size})
        return JSONResponse({"checkpoints": found})

    # Sampling

    def _add_sampler(self, owner: _Owner, name: str, sampler: BankSampler, path: str | None, *, of: str) -> None:
        owner.samplers[name] = _Sampler(sampler, path, of)
        own = [key for key, each in list(owner.samplers.items()) if each.of == of]
        for old in own[: -self._limits.samplers]:
            owner.samplers.pop(old, None)

    async def _create_sampler(self, request: Request, owner: _Owner) -> Response:
        call = await self._read(request, wire.SamplerCall)
        session = self._session(owner, call.session_id)
        name = f"{session}:sample:{call.sampling_session_seq_id}"
        if name not in owner.samplers:
            if call.model_path is not None:
                folder = self._folder(owner, call.model_path)
                sampler = await asyncio.to_thread(self._bank.load_sampler, folder)
            else:
                self._require_base(call.base_model)
                sampler = self._bank.base()
            self._add_sampler(owner, name, sampler, call.model_path, of=session)
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": name})

    async def _sampler(self, request: Request, owner: _Owner) -> Response:
        name = request.path_params["name"]
        path = self._known_sampler(owner, name).path
        return JSONResponse({"sampler_id": name, "base_model": self._bank.config.id, "model_path": path})

    def _known_sampler(self, owner: _Owner, name: str) -> _Sampler:
        if (found := owner.samplers.get(name)) is None:
            raise RequestRefused(
                f"No sampler is called {name}: a model keeps its last {self._limits.samplers}.", status=404
            )
        return found

    async def _sample(self, request: Request, owner: _Owner) -> Response:
        call = await self._read(request, wire.SampleCall)
        sampler = self._known_sampler(owner, call.sampling_session_id).weights
        name = f"{call.sampling_session_id}:{call.seq_id}"
        ids = [f"{name}:{number}" for number in range(call.num_samples if 0 < call.num_samples < 4096 else 0)]
        if name not in owner.promises:
            prompt = [token for chunk in call.prompt.chunks for token in chunk.tokens]
            settings = call.sampling_params.model_dump()
            top = max(call.topk_sample_logprobs, call.topk_prompt_logprobs)
            scored = bool(call.prompt_logprobs or call.topk_prompt_logprobs)
            asked = await asyncio.to_thread(
                sampler.sample, prompt, samples=call.num_samples, prompt_logprobs=scored, top_logprobs=top, **settings
            )
            encode = _Sampled(owner, call, len(prompt) if scored else 0)
            asked.add_done_callback(encode.count)
            self._keep(owner, name, _Promise(asked, encode))
        return JSONResponse({"request_id": name, "sample_sequence_ids": ids})

    async def _capabilities(self, _: Request, __: _Owner) -> Response:
        model = {"model_name": self._bank.config.id, "max_context_length": self._bank.context}
        return JSONResponse({"supported_models": [{**model, "trainable": True, "sampleable": True}]})

    async def _usage(self, _: Request, owner: _Owner) -> Response:
        waiting = sum(each.client.tokens_waiting for each in list(owner.models.values()))
        return JSONResponse({**owner.tokens, "waiting": waiting, "adapters": len(owner.models)})


class _Sampled:
    """Writes sampled answers, and counts their tokens."""

    def __init__(self, owner: _Owner, call: wire.SampleCall, prompt: int) -> None:
        self._owner, self._prompt, self._last = owner, prompt, call.prompt_logprobs_last_n
        self._top, self._prompt_top = call.topk_sample_logprobs, call.topk_prompt_logprobs

    def count(self, done: Future[Any]) -> None:
        """Add the tokens of answers that have ended."""
        if not done.cancelled() and done.exception() is None:
            self._owner.tokens["sampled"] += sum(len(each.tokens) for each in done.result().answers)

    def __call__(self, found: Any) -> Response:
        message = wire.samples_response(
            found, prompt=self._prompt, top=self._top, prompt_top=self._prompt_top, last=self._last
        )
        return _proto(message)


def _passed_on(asked: Future[Any], to: Future[Any]) -> None:
    def done(future: Future[Any]) -> None:
        if future.cancelled():
            to.cancel()
        elif (error := future.exception()) is not None:
            to.set_exception(error)
        else:
            to.set_result(future.result())

    asked.add_done_callback(done)


def _saying(said: Mapping[str, Any]) -> Callable[[Request, _Owner], Any]:
    async def answer(_: Request, __: _Owner) -> Response:
        return JSONResponse(said)

    return answer


def _json(said: Mapping[str, Any]) -> Callable[[Any], Response]:
    return lambda _: JSONResponse(said)


def _proto(message: bytes) -> Response:
    return Response(message, media_type="application/x-protobuf")


def _mistakes(error: ValidationError) -> str:
    found = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_url=False)[:5]]
    return "; ".join(found).encode("utf-8", "replace").decode()[:1000]


async def _unknown(request: Request, error: HTTPException) -> Response:
    return RequestRefused(f"{request.method} {request.url.path}: {error.detail}.", status=error.status_code).response


async def _failed(_: Request, error: Exception) -> Response:
    _log.error("A request failed", exc_info=error)
    return RequestRefused("The server failed, and has noted why.", status=500).response
