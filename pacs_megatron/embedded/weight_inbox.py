"""Copies a policy's exported weights into a Hugging Face module; sampling needs a complete set."""

import re

import torch

from pacs_megatron.contracts.digest import WeightDigest
from pacs_megatron.errors import SyncError
from pacs_megatron.models import VISION_PREFIX


class WeightInbox:
    """A WeightReceiver for a module.

    `version` and `digest` are those of the export, and None while sampling is not allowed. They
    stay None after a failed or incomplete update, until a complete one: the module contains a
    mixture.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._targets, self._aliases = _targets(module)
        self._received: set[str] = set()
        """names in this update"""
        self._filled: set[str] = set()
        """keys of `_targets` in this update"""
        self._hash: WeightDigest | None = None
        self._pending_version: int | None = None
        self.version: int | None = None
        self.digest: str | None = None

    def begin_update(self, version: int) -> None:
        """Starts an update, or starts it over; weights of an incomplete update are discarded."""
        self.version = None
        self.digest = None
        self._pending_version = version
        self._received = set()
        self._filled = set()
        self._hash = WeightDigest()

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Copies one weight. Raises SyncError for an unknown or repeated name, or a wrong shape."""
        if self._hash is None:
            raise SyncError(f"weight {name} arrived outside an update; call begin_update first")
        if name in self._received:
            raise SyncError(
                f"weight {name} arrived twice in the update to version {self._pending_version}"
            )
        # The module has no vision tower, so it has the names of a language model alone.
        own_name = name.replace(VISION_PREFIX, "model.", 1)
        source = self._aliases.get(own_name, own_name)
        target = self._targets.get(source)
        if target is None:
            raise SyncError(
                f"weight {name} is not in the rollout model (update to version "
                f"{self._pending_version}); its names look like {next(iter(self._targets))}"
            )
        if target.shape != tensor.shape:
            raise SyncError(
                f"weight {name} has shape {list(tensor.shape)}, the rollout model expects "
                f"{list(target.shape)}; policy and rollout must come from the same config.json"
            )

        self._hash.update(name, tensor)
        if source not in self._filled:
            with torch.no_grad():
                target.copy_(tensor)
        # A tied weight may come under both of its names, if it is the same one.
        elif not torch.equal(target, tensor.to(target)):
            raise SyncError(
                f"weight {name} is tied to another in the rollout model, but differs from it; "
                "check tie_word_embeddings in config.json"
            )
        self._filled.add(source)
        self._received.add(name)

    def end_update(self, digest: str) -> None:
        """Raises SyncError unless every weight has arrived and their digest is `digest`."""
        if self._hash is None or self._pending_version is None:
            raise SyncError("end_update without begin_update")
        missing = sorted(self._targets.keys() - self._filled)
        if missing:
            raise SyncError(
                f"update to version {self._pending_version} ended without {len(missing)} of "
                f"{len(self._targets)} weights, the first is {missing[0]}"
            )
        received_digest = self._hash.hexdigest()
        if received_digest != digest:
            raise SyncError(
                f"update to version {self._pending_version}: the received weights have digest "
                f"{received_digest}, expected {digest}"
            )
        self.version = self._pending_version
        self.digest = digest
        self._hash = None


def _targets(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors that weights are copied to, and the second names of tied tensors.

    Mixture-of-experts modules have all experts of a layer in one tensor, a checkpoint has one
    tensor for each.

    Returns:
        targets: name in a checkpoint -> tensor.
        aliases: second name of a tied tensor -> its first name.
    """
    targets: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    first_names: dict[int, str] = {}
    # state_dict has the names of a checkpoint, tied weights under both names.
    for name, tensor in module.state_dict(keep_vars=True).items():
        first = first_names.setdefault(id(tensor), name)
        if first != name:
            aliases[name] = first
        else:
            targets.update(_split_experts(name, tensor.detach()))
    return targets, aliases


def _split_experts(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Name in a checkpoint -> view of the tensor; filling the views fills the tensor."""
    match = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)", name)
    if match is None or tensor.dim() != 3:
        return {name: tensor}
    prefix, kind = match.groups()
    views: dict[str, torch.Tensor] = {}
    for expert, fused in enumerate(tensor.unbind(0)):
        if kind == "down_proj":
            views[f"{prefix}.{expert}.down_proj.weight"] = fused
        else:
            gate, up = fused.chunk(2, dim=0)
            views[f"{prefix}.{expert}.gate_proj.weight"] = gate
            views[f"{prefix}.{expert}.up_proj.weight"] = up
    return views
