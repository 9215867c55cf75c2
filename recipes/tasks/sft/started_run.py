"""A run that may go on from the adapter of another one, which is then what it is compared with."""

from __future__ import annotations

from torch import nn

from workbench.adapters import anatomy
from workbench.models.backbones import Backbone
from workbench.models.exported import ExportedModel
from workbench.recipes.single import start_adapter
from workbench.recipes.tasks.sft.text_run import TextRun


class StartedRun(TextRun):
    """A run that goes on from the adapter that the section of its recipe names, if it names any."""

    def assemble(self, model: nn.Module, backbone: Backbone) -> ExportedModel:
        live = super().assemble(model, backbone)
        if start_adapter.wanted(self.config).run is None:
            return live
        start_adapter.load(self.config, model)
        if self.unscored:
            live.model.eval()
            self.write_before(live)
            live.model.train()
        return live

    def score_before(self, backbone: Backbone) -> bool:
        if start_adapter.wanted(self.config).run is None:
            return super().score_before(backbone)
        if not self.placement.cuts_weights or not self.unscored:
            return False  # what training starts from is there with the adapter
        self.assemble(self.adapted(backbone, blocks=len(anatomy.decoder_layers(backbone.model))), backbone)
        return True
