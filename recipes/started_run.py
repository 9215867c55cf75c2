"""A run that may go on from the adapter of another one, which is then what it is compared with."""

from __future__ import annotations

from torch import nn

from workbench.models.backbones import Backbone
from workbench.models.exported import ExportedModel
from workbench.recipes import start_adapter
from workbench.recipes.sft import TextRun


class StartedRun(TextRun):
    """A run that goes on from the adapter that the section of its recipe names, if it names any."""

    def assemble(self, model: nn.Module, backbone: Backbone) -> ExportedModel:
        live = super().assemble(model, backbone)
        if start_adapter.wanted(self.config).run is None:
            return live
        start_adapter.load(self.config, model)
        if not self.run.ranks.agreed((self.run.path / "before.json").exists()) and self.placement.scores:
            live.model.eval()
            self.write_before(live)
            live.model.train()
        return live

    def score_before(self, backbone: Backbone) -> bool:
        if start_adapter.wanted(self.config).run is not None:  # what training starts from is there with the adapter
            return False
        return super().score_before(backbone)
