"""Bad gradients that the optimizer never gets to see: the script has put finite numbers in their place."""

from __future__ import annotations

import msgspec

from ampguard.incident import Incident


def with_replaced(incident: Incident) -> Incident:
    """Said with the incident of these gradients."""
    text = (
        " The script puts finite numbers in the place of such gradients before its optimizer uses them: nothing shows, and "
        "what this step was to teach is lost."
    )
    return msgspec.structs.replace(
        incident, explanation=incident.explanation + text, evidence=incident.evidence | {"replaced_by_script": True}
    )
