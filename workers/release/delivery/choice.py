"""Choose the delivery."""

from app.core.settings import Settings
from workers.release.delivery.adapters import AdapterDelivery
from workers.release.delivery.base import Delivery
from workers.release.delivery.full_weights import FullWeightsDelivery

DELIVERIES: dict[str, Delivery] = {"lora": AdapterDelivery(), "full": FullWeightsDelivery()}  # by trainer.adaptation


def delivery_of(settings: Settings) -> Delivery:
    """Return how the versions of this deployment are delivered: all are of one kind."""
    return DELIVERIES[settings.trainer.adaptation]
