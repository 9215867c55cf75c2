"""Every policy; importing this makes them known to `freeze.policy`."""

from workbench.config.freeze_policies.autofreeze import AutoFreeze
from workbench.config.freeze_policies.badam import Badam
from workbench.config.freeze_policies.egeria import Egeria
from workbench.config.freeze_policies.freezeout import FreezeOut
from workbench.config.freeze_policies.gradual import Gradual
from workbench.config.freeze_policies.lisa import Lisa
from workbench.config.freeze_policies.smartfrz import SmartFrz
from workbench.config.freeze_policies.static import Static

__all__ = ["AutoFreeze", "Badam", "Egeria", "FreezeOut", "Gradual", "Lisa", "SmartFrz", "Static"]
