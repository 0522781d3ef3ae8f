"""The collectives of a training step: what each moves, between whom, how long it takes, and what of it compute hides."""

from calc.communication.answer import CommunicationAnswer, communication
from calc.communication.collectives import Collective, collectives_of, context_exchanges, tensor_blocks
from calc.communication.links import usual_links
from calc.communication.plan import CommunicationPlan
from calc.communication.topology import Group, Topology, network_note, topology_of

__all__ = [
    "Collective",
    "CommunicationAnswer",
    "CommunicationPlan",
    "Group",
    "Topology",
    "collectives_of",
    "communication",
    "context_exchanges",
    "network_note",
    "tensor_blocks",
    "topology_of",
    "usual_links",
]
