"""Every policy; importing this makes them known to `freeze.policy`."""

from workbench.freezing.autofreeze import AutoFreeze
from workbench.freezing.egeria import Egeria
from workbench.freezing.freezeout import FreezeOut
from workbench.freezing.gradual import Gradual
from workbench.freezing.lisa import Lisa
from workbench.freezing.static import Static

__all__ = ["AutoFreeze", "Egeria", "FreezeOut", "Gradual", "Lisa", "Static"]
