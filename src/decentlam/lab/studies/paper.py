"""The paper's own scores (Yuan et al., ICCV 2021), to stand beside what was measured here."""

from __future__ import annotations

# Table 3: ImageNet, ResNet-50, 8 nodes, symmetric exponential graph; top-1 in % with batches of 2K,
# 8K, 16K and 32K. DSGD is not among its rows.
IMAGENET = {
    "pmsgd": "76.32 / 76.08 / 76.27 / 75.27",
    "pmsgd-lars": "76.16 / 75.95 / 76.65 / 75.63",
    "dmsgd": "76.27 / 76.01 / 76.23 / 74.97",
    "da-dmsgd": "76.35 / 76.19 / 76.62 / 75.51",
    "awc-dmsgd": "76.29 / 75.96 / 76.31 / 75.37",
    "slowmo": "76.3 / 75.47 / 75.53 / 75.33",
    "qg-dmsgd": "76.23 / 75.96 / 76.6 / 75.86",
    "d2-dmsgd": "75.44 / 75.3 / 76.16 / 75.44",
    "decentlam": "76.43 / 76.19 / 76.73 / 76.22",
}

# Table 5: DecentLaM on ImageNet, ResNet-50, by topology, with batches of 16K and 32K.
TOPOLOGIES = {
    "ring": "76.65 / 76.34",
    "mesh": "76.54 / 76.47",
    "symmetric-exponential": "76.73 / 76.22",
    "bipartite-random-match": "76.53 / 76.11",
}

# Table 6: mAP in % on VOC and COCO by detector, ResNet-50-FPN, 8 nodes, symmetric exponential
# graph, total batch 256.
DETECTION = {
    "R-Net": {
        "pmsgd": "79 / 36.2",
        "pmsgd-lars": "78.5 / 35.7",
        "dmsgd": "79.1 / 36.1",
        "da-dmsgd": "79 / 36.4",
        "decentlam": "79.3 / 36.6",
    },
    "F-RCNN": {
        "pmsgd": "80.3 / 36.5",
        "pmsgd-lars": "79.8 / 36.2",
        "dmsgd": "80.5 / 36.4",
        "da-dmsgd": "80.5 / 37",
        "decentlam": "80.7 / 37.1",
    },
}
