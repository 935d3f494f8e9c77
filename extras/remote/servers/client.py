"""One vLLM server over HTTP: its settings, weight updates, and generation from token ids.

The interface is vLLM's own: `/inference/v1/generate`, token ids in and token ids out, and the
routes for weight transfer that a server has with VLLM_SERVER_DEV_MODE=1. `prepare_network` and
`address_for` find the addresses under which this machine and servers on others reach each other.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import math
import os
import socket
import threading
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import psutil

from hybridengine.engine.response import Response, pack_kept
from hybridengine.remote.servers.images import ServerPrompt, check_image_settings
from hybridengine.run.errors import RolloutError, shorten
from hybridengine.run.messages import check_secret
from hybridengine.sync.weight_target import combined_checksum

BACKEND = "hybridengine"  # of vLLM's weight transfer
EXACT = "hybridengine_exact"  # key of vLLM's additional_config, which the plug-in reads
WEIGHTS_STATE = "hybridengine_weights_state"  # method that the plug-in adds to vLLM's workers
HOW_TO_START = (
    "start it with VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode "
    f'processed_logprobs --weight-transfer-config \'{{"backend": "{BACKEND}"}}\'; '
    "on a CPU also with --enforce-eager"
)
# Queries of /pause, by keep_kv. vLLM clears its caches unless told otherwise, and preempts running
# requests for that. Else the plug-in drops cached prefixes as the label of the weights changes.
_PAUSES = {None: "mode=wait", False: "mode=keep", True: "mode=keep&clear_cache=false"}
_CACHE_DTYPES = (None, "auto", "float16", "bfloat16", "float32")  # of a server: not quantized
_SHORT_TIMEOUT_S = 10.0  # of requests that need neither the engine nor another process


class ServerLostError(RuntimeError):
    """A server is gone, or does not do what it should; another one may.

    status: of its answer, None if there was none.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        self.status = status
        super().__init__(message)


@dataclass(frozen=True)
class TrainersStore:
    """Where the workers of a server find the trainers: a `TCPStore`, and the prefix of its keys.

    timeout_s: as `WeightReceiver`.
    """

    host: str
    port: int
    prefix: str
    timeout_s: float


class ServerWeights(NamedTuple):
    """The weights of a server.

    version: of the last complete sync.
    checksum: of their bits on all workers, 16 hexadecimal digits.
    """

    version: int
    checksum: str


class VllmServer:
    """The server at `url` (http://host:port), as number `index` among the engines of a run.

    timeout_s: longest wait for an answer. All methods raise ServerLostError, with the URL, where it
    does not come or is an error of the server, and RolloutError where the request is at fault. They
    may run in several threads.
    """

    def __init__(self, url: str, index: int, timeout_s: float) -> None:
        self.url, self.index, self._timeout_s = url.rstrip("/"), index, timeout_s
        parts = urlsplit(self.url)
        self.host, self._path = parts.hostname or "", parts.path
        secure = parts.scheme == "https"
        self._connection_type = (
            http.client.HTTPSConnection if secure else http.client.HTTPConnection
        )
        self._port = parts.port or (443 if secure else 80)
        self._lock, self._open = threading.Lock(), set[http.client.HTTPConnection]()
        self._checked_images = False

    def __str__(self) -> str:
        return f"server {self.url}"

    # State

    def check_health(self) -> None:
        self.request("GET", "/health", timeout_s=_SHORT_TIMEOUT_S)

    def settings(self) -> dict[str, Any]:
        """Return vLLM's configuration of the server."""
        info: dict[str, Any] = self.request("GET", "/server_info?config_format=json")
        return dict(info["vllm_config"])

    def check_images(self, options: Mapping[str, Any]) -> None:
        """Raise RolloutError if it prepares images otherwise; options: data.mm_processor_kwargs."""
        if not self._checked_images:
            check_image_settings(self, self.settings()["model_config"], options)
            self._checked_images = True

    def check_settings(
        self,
        max_model_len: int,
        long_rope_limit: int | None = None,
        is_inner: bool = False,
        has_min_p: bool = False,
    ) -> None:
        """Raise RolloutError if the server lacks an option, or is for other sequences.

        max_model_len: the longest sequence that is trained, in tokens.
        long_rope_limit: the longest sequence with the short factors of the model's LongRoPE, None
            without one.
        is_inner: whether the language model of the checkpoint is trained alone.
        has_min_p: whether requests have min-p, which vLLM ignores where it drafts.
        """
        info = self.settings()
        model, transfer = info["model_config"], info["weight_transfer_config"] or {}
        if transfer.get("backend") != BACKEND or model["logprobs_mode"] != "processed_logprobs":
            raise RolloutError(
                f"{self} has --weight-transfer-config {transfer or None} and --logprobs-mode "
                f"{model['logprobs_mode']}; {HOW_TO_START}"
            )
        images = model.get("multimodal_config")
        if is_inner and images and not images.get("language_model_only"):
            raise RolloutError(
                f"{self} serves a model with a tower for images, of which the language model is "
                "trained alone; start it with --language-model-only"
            )
        cache, drafting = info.get("cache_config") or {}, info.get("speculative_config")
        sampling = {  # see hybridengine.engine.vllm.options
            "--logits-processors": model.get("logits_processors"),
            "--speculative-config": drafting and (drafting["method"] != "ngram" or has_min_p),
            "--watermark-config": info.get("watermark_config"),
            "--reasoning-config": info.get("reasoning_config"),
            "--diffusion-config": info.get("diffusion_config"),
            "--kv-cache-dtype": (dtype := cache.get("cache_dtype")) not in _CACHE_DTYPES and dtype,
        }
        if given := [option for option, value in sampling.items() if value]:
            raise RolloutError(
                f"{self} has {' and '.join(given)}, which would sample from another distribution "
                "than the one that is trained; start it without"
            )
        if model["max_model_len"] < max_model_len:
            raise RolloutError(
                f"{self} has --max-model-len {model['max_model_len']}, less than the longest "
                f"prompt with its response, {max_model_len} tokens; raise it"
            )
        limit = long_rope_limit
        if limit is not None and (model["max_model_len"] > limit) != (max_model_len > limit):
            raise RolloutError(
                f"{self} has --max-model-len {model['max_model_len']}, and LongRoPE has other "
                f"factors above {limit} tokens than up to there; the longest sequence that is "
                f"trained has {max_model_len}: start the server with --max-model-len "
                f"{max_model_len}, or set rollout.max_model_len"
            )

    def check_exact(self, dtype: str) -> None:
        """Raise RolloutError unless it has the operators of a model that is trained in `dtype`."""
        info = self.settings()
        found = {
            f"--additional-config '{{\"{EXACT}\": true}}'": info["additional_config"].get(EXACT),
            f"--dtype {dtype}": dtype in str(info["model_config"]["dtype"]),
        }
        if missing := [option for option, value in found.items() if not value]:
            raise RolloutError(
                f"rollout.exact is on, but {self} was started without {' and '.join(missing)}; "
                "start it again with that, or set rollout.exact=off"
            )

    # Weights

    def join(self, store: TrainersStore, records_kept: bool = False) -> None:
        """Make its workers an engine of the weight sync; replaces what they joined before.

        records_kept: its completions have the entries that truncated sampling kept.

        Raises RolloutError where they cannot, such as a model that differs from the trained one, or
        packages in their environment that add logits processors.
        """
        how = {"samples": True, "records_kept": records_kept}
        info = {"index": self.index, **how, **vars(store)}
        try:
            self.init_weight_transfer_engine(info)
        except ServerLostError as error:
            raise RolloutError(str(error)) if error.status else error from None

    def update(self, version: int, label: str, keep_kv: bool | None = None) -> None:
        """Take part in the sync to `version`; `label` is the server's name of it.

        New requests wait. keep_kv: None: requests that run are finished first. Otherwise they wait,
        too, and go on with the new weights: True: from the keys and values that they have; False:
        from ones that are computed again. Where the update fails the server stays paused, as its
        weights may be partially updated.
        """
        self.pause(keep_kv)
        self.start_weight_update()
        self.update_weights({"version": version})
        self.finish_weight_update(label)
        self.resume()

    def pause(self, keep_kv: bool | None) -> None:
        """Let new requests wait; what running ones do: see `update`."""
        self.request("POST", f"/pause?{_PAUSES[keep_kv]}")

    def resume(self) -> None:
        self.request("POST", "/resume")

    def weights(self) -> ServerWeights:
        """Let the workers read their weights. Running requests wait meanwhile."""
        answer = self.request("POST", "/collective_rpc", {"method": WEIGHTS_STATE})
        try:
            workers = [ServerWeights(x["version"], x["checksum"]) for x in answer["results"]]
            [version] = {worker.version for worker in workers}
            return ServerWeights(int(version), combined_checksum(w.checksum for w in workers))
        except (KeyError, TypeError, ValueError) as error:
            raise self._unexpected(answer, error) from None

    def _unexpected(self, answer: object, error: Exception) -> ServerLostError:
        text = shorten(json.dumps(answer), 300)
        return ServerLostError(f"{self} answered {text}, not as expected ({error!r})")

    # The four calls of vLLM's `VLLMWeightSyncClient`

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        self.request("POST", "/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self.request("POST", "/start_weight_update")

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        self.request("POST", "/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.request("POST", "/finish_weight_update", {"weight_version": weight_version})

    def leave(self) -> None:
        """End its connections to the trainers."""
        self.request("POST", "/shutdown_weight_transfer_engine", timeout_s=_SHORT_TIMEOUT_S)

    # Generation

    def complete(
        self,
        prompt: ServerPrompt,
        sampling: Mapping[str, Any],
        versions: Mapping[str, int],
        vocab_size: int | None = None,
    ) -> list[Response]:
        """Return sampling["n"] completions.

        sampling: vLLM's `SamplingParams`.
        versions: of the weights, by their labels; a completion of other weights is an error of the
          server.
        vocab_size: given to add the columns of what sampling kept; the server joined with
          `records_kept`.
        """
        body = {**prompt.request(), "sampling_params": sampling}
        answer = self.request("POST", "/inference/v1/generate", body)
        try:
            prompt.check(self, answer)
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            completions = [self._completion(x, versions, vocab_size) for x in choices]
        except (KeyError, TypeError) as error:
            raise self._unexpected(answer, error) from None
        if len(completions) != sampling["n"]:
            raise ServerLostError(
                f"{self} returned {len(completions)} completions, not {sampling['n']}"
            )
        return completions

    def _completion(
        self, choice: Mapping[str, Any], versions: Mapping[str, int], vocab_size: int | None
    ) -> Response:
        ids, log_probs = choice["token_ids"], choice["logprobs"]["content"]
        spans = choice["weight_versions"] or ()
        if choice["finish_reason"] not in ("stop", "length"):
            raise ServerLostError(f"{self} ended a request with {choice['finish_reason']!r}")
        if unknown := sorted({span["version"] for span in spans} - versions.keys()):
            raise ServerLostError(
                f"{self} generated with the weights {', '.join(unknown)}, which are not of this "
                "run: it was restarted, or others updated it"
            )
        runs = [(versions[span["version"]], span["end"] - span["start"]) for span in spans]
        if (labelled := sum(size for _, size in runs)) != len(ids):
            raise ServerLostError(
                f"{self} returned versions of {labelled} tokens for {len(ids)}, not one each"
            )
        if [entry["token_id"] for entry in log_probs] != ids:
            raise ServerLostError(
                f"{self} returned {len(log_probs)} log-probs for {len(ids)} tokens, not one each"
            )
        values = [float(entry["logprob"]) for entry in log_probs]
        if not all(math.isfinite(x) for x in values):
            raise ServerLostError(f"{self} returned a log-prob that is not finite")
        columns = dict[str, Any]()
        if vocab_size is not None:
            columns |= self._kept(ids, choice["sampling_mask"] or (), vocab_size)
        return Response(ids, values, choice["finish_reason"], runs, columns)

    def _kept(
        self, token_ids: Sequence[int], masks: Sequence[Sequence[int]], vocab_size: int
    ) -> dict[str, array[int]]:
        """Return the columns of what sampling kept for each token."""
        try:
            columns = pack_kept(token_ids, masks, vocab_size)
            ids = np.concatenate([columns["kept_ids"], array("i", token_ids)])
        except (RuntimeError, OverflowError) as error:
            raise ServerLostError(f"{self}, sampling_mask: {error}") from None
        if outside := sorted(set(ids[(ids < 0) | (ids >= vocab_size)].tolist())):
            raise ServerLostError(
                f"{self} returned the id {outside[0]}, outside of the vocabulary of {vocab_size}"
            )
        kept, counts = ids[: len(ids) - len(token_ids)], columns["num_kept"]
        if (np.diff(np.repeat(np.arange(len(counts)) * vocab_size, counts) + kept) <= 0).any():
            raise ServerLostError(f"{self} returned kept ids of a token that do not ascend")
        return columns

    # HTTP

    def abort(self) -> None:
        """End all requests that wait for an answer; they raise ServerLostError."""
        with self._lock:
            for connection in self._open:
                with suppress(OSError, AttributeError):  # AttributeError: not connected yet
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def request(
        self, method: str, path: str, body: object = None, timeout_s: float | None = None
    ) -> Any:
        """Return the JSON of the answer, None if it is empty."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        connection = self._connection_type(self.host, self._port, timeout=timeout_s)
        what = f"{self}, {method} {path.partition('?')[0]}"
        with self._lock:
            self._open.add(connection)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(
                method, self._path + path, data, {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            text = response.read()
            answer = json.loads(text) if text and response.status < 400 else None
        except TimeoutError:
            raise ServerLostError(f"{what}: no answer within {timeout_s:g} s") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServerLostError(f"{what}: {error or type(error).__name__}") from None
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()
        if response.status >= 400:
            self._raise(what, response.status, text)
        return answer

    def _raise(self, what: str, status: int, text: bytes) -> None:
        if status == 404:
            raise RolloutError(f"{what}: the server does not know it; {HOW_TO_START}")
        try:
            reason = json.loads(text)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            reason = text.decode(errors="replace").strip()
        message = f"{what}: status {status}: {shorten(str(reason), 500)}"
        raise ServerLostError(message, status) if status >= 500 else RolloutError(message)


def address_for(host: str, address: tuple[str, int]) -> tuple[str, int]:
    """Return `address`, of a port on this machine or another, as the machine `host` reaches it.

    Raises RolloutError for a host that is unknown or cannot be reached.

    Examples:
        >>> address_for("localhost", ("127.0.0.1", 29500))
        ('127.0.0.1', 29500)
    """
    own, port = address
    if _is_loopback(own) and not _is_loopback(host):
        own = own_address_towards(host)
    return own, port


def prepare_network(urls: Sequence[str]) -> None:
    """Let gloo and NCCL use the interface towards servers on other machines, unless one is set.

    On one machine alone they use the loopback interface, which others cannot reach. Does nothing
    for hosts that are unknown: who connects to them reports it. Raises SecretError if there are
    servers and no secret, which they must have in common with the ranks.
    """
    if urls:
        check_secret("the servers of rollout.servers verify by it what the trainers tell them")
    with suppress(RolloutError):
        remote = _remote_hosts(urls)
        own = own_address_towards(remote[0]) if remote else None
        for name, addresses in psutil.net_if_addrs().items():
            if any(entry.address.partition("%")[0] == own for entry in addresses):
                for library in ("GLOO", "NCCL"):
                    os.environ.setdefault(f"{library}_SOCKET_IFNAME", name)


def has_remote(urls: Sequence[str]) -> bool:
    """Return whether a server may be on another machine."""
    try:
        return bool(_remote_hosts(urls))
    except RolloutError:
        return True


def _remote_hosts(urls: Sequence[str]) -> list[str]:
    hosts = (urlsplit(url).hostname or "" for url in urls)
    return [host for host in hosts if not _is_loopback(host)]


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(socket.gethostbyname(host))
    except OSError as error:
        raise RolloutError(f"rollout.servers: the host {host!r} is unknown ({error})") from None
    return address.is_loopback or address.is_unspecified  # a client reaches itself at 0.0.0.0


def own_address_towards(host: str) -> str:
    """Return the address of this machine from which packets to `host` leave."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RolloutError(f"rollout.servers: no route to {host!r} ({error})") from None
