"""The paper's own accuracies (Yuan et al., ICCV 2021), to stand beside what was measured here."""

from __future__ import annotations

# Table 3: ImageNet, ResNet-50, 8 nodes, symmetric exponential graph; top-1 in %, by total batch.
# DSGD is not among its rows.
IMAGENET: dict[str, dict[str, float]] = {
    "pmsgd": {"2K": 76.32, "8K": 76.08, "16K": 76.27, "32K": 75.27},
    "pmsgd-lars": {"2K": 76.16, "8K": 75.95, "16K": 76.65, "32K": 75.63},
    "dmsgd": {"2K": 76.27, "8K": 76.01, "16K": 76.23, "32K": 74.97},
    "da-dmsgd": {"2K": 76.35, "8K": 76.19, "16K": 76.62, "32K": 75.51},
    "awc-dmsgd": {"2K": 76.29, "8K": 75.96, "16K": 76.31, "32K": 75.37},
    "slowmo": {"2K": 76.30, "8K": 75.47, "16K": 75.53, "32K": 75.33},
    "qg-dmsgd": {"2K": 76.23, "8K": 75.96, "16K": 76.60, "32K": 75.86},
    "d2-dmsgd": {"2K": 75.44, "8K": 75.30, "16K": 76.16, "32K": 75.44},
    "decentlam": {"2K": 76.43, "8K": 76.19, "16K": 76.73, "32K": 76.22},
}

# Table 5: DecentLaM on ImageNet, ResNet-50, by topology.
TOPOLOGIES: dict[str, dict[str, float]] = {
    "ring": {"16K": 76.65, "32K": 76.34},
    "mesh": {"16K": 76.54, "32K": 76.47},
    "symmetric-exponential": {"16K": 76.73, "32K": 76.22},
    "bipartite-random-match": {"16K": 76.53, "32K": 76.11},
}


# Table 6: mAP in %, ResNet-50-FPN, 8 nodes, symmetric exponential graph, total batch 256.
DETECTION: dict[str, dict[str, dict[str, float]]] = {
    "pmsgd": {"VOC": {"R-Net": 79.0, "F-RCNN": 80.3}, "COCO": {"R-Net": 36.2, "F-RCNN": 36.5}},
    "pmsgd-lars": {"VOC": {"R-Net": 78.5, "F-RCNN": 79.8}, "COCO": {"R-Net": 35.7, "F-RCNN": 36.2}},
    "dmsgd": {"VOC": {"R-Net": 79.1, "F-RCNN": 80.5}, "COCO": {"R-Net": 36.1, "F-RCNN": 36.4}},
    "da-dmsgd": {"VOC": {"R-Net": 79.0, "F-RCNN": 80.5}, "COCO": {"R-Net": 36.4, "F-RCNN": 37.0}},
    "decentlam": {"VOC": {"R-Net": 79.3, "F-RCNN": 80.7}, "COCO": {"R-Net": 36.6, "F-RCNN": 37.1}},
}


def line(values: dict[str, float]) -> str:
    """Return the values of a row in one cell."""
    return " / ".join(f"{value:g}" for value in values.values())
