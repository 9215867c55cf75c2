"""Every policy; importing this makes them known to `freeze.policy`."""

from workbench.policies.autofreeze import AutoFreeze
from workbench.policies.egeria import Egeria
from workbench.policies.freezeout import FreezeOut
from workbench.policies.gradual import Gradual
from workbench.policies.lisa import Lisa
from workbench.policies.static import Static

__all__ = ["AutoFreeze", "Egeria", "FreezeOut", "Gradual", "Lisa", "Static"]
