"""Public convolutional networks behind published latencies, on the meta device: graphs without values.

Batch normalisation is folded into the convolutions, as every inference runtime does it: a convolution has a bias
and no normalisation follows. Only a normalisation before its convolution (DenseNet) stays. Tensors are [B, C, H, W]
unless a docstring says otherwise, and ``forward`` takes one image batch [B, 3, H, W].
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Activation = Callable[[], nn.Module]
Recipe = Callable[[], nn.Module]


# Shared blocks


def conv(
    inputs: int,
    outputs: int,
    kernel: int | tuple[int, int] = 1,
    stride: int = 1,
    groups: int = 1,
    act: Activation | None = nn.ReLU,
    padding: int | tuple[int, int] | None = None,
) -> nn.Module:
    """A convolution with its folded bias and an activation: [B, inputs, H, W] → [B, outputs, ⌈H/stride⌉, ⌈W/stride⌉].

    Half the kernel is the default padding: the output then has the size of TensorFlow's "SAME" padding too.
    """
    if padding is None:
        padding = kernel // 2 if isinstance(kernel, int) else (kernel[0] // 2, kernel[1] // 2)
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups)
    return layer if act is None else nn.Sequential(layer, act())


def separable(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, act: Activation = nn.ReLU) -> nn.Module:
    """A depthwise and a pointwise convolution, each with its activation."""
    return nn.Sequential(conv(inputs, inputs, kernel, stride, inputs, act), conv(inputs, outputs, act=act))


class Concat(nn.Module):
    """Joins tensors along the channels: [B, C₁, H, W], [B, C₂, H, W], … → [B, ΣC, H, W]."""

    def forward(self, *parts: Tensor) -> Tensor:
        return torch.cat(parts, 1)


class Branches(nn.Module):
    """Applies every branch to the same input and joins the results along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class Residual(nn.Module):
    """body(x) + shortcut(x), then an activation; an absent shortcut passes x on."""

    def __init__(self, body: nn.Module, shortcut: nn.Module | None = None, act: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.shortcut, self.act = body, shortcut, act

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x) + (x if self.shortcut is None else self.shortcut(x))
        if self.act is not None:
            y = self.act(y)
        return y


class Squeeze(nn.Module):
    """Squeeze and excitation: scales each channel by a gate computed from the channels' means."""

    def __init__(self, channels: int, middle: int, act: Activation, gate: Activation) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, middle, 1), act(), nn.Conv2d(middle, channels, 1), gate()
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x * self.gate(x)
        return y


class Net(nn.Module):
    """Layers in order of computation, each fed by earlier results; returns the last result or the named ones.

    Result 0 is the image; ``add`` returns the number of the new result. ``width`` holds the channels of each result.
    """

    def __init__(self, image: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.sources: list[tuple[int, ...]] = []
        self.width = [image]
        self.outputs: tuple[int, ...] = ()

    def add(self, layer: nn.Module, width: int, *sources: int) -> int:
        """Append a layer of ``width`` output channels; without sources the last result feeds it."""
        self.layers.append(layer)
        self.sources.append(sources or (len(self.width) - 1,))
        self.width.append(width)
        return len(self.width) - 1

    def block(self, make: Callable[..., nn.Module], width: int, *args: Any, source: int | None = None) -> int:
        """Append ``make(input channels, width, *args)``."""
        source = len(self.width) - 1 if source is None else source
        return self.add(make(self.width[source], width, *args), width, source)

    def join(self, *sources: int) -> int:
        """Append the concatenation of earlier results."""
        return self.add(Concat(), sum(self.width[source] for source in sources), *sources)

    def upsample(self) -> int:
        """Append the last result at twice its height and width."""
        return self.add(nn.Upsample(scale_factor=2), self.width[-1])

    def forward(self, x: Tensor) -> Any:
        results = [x]
        for layer, sources in zip(self.layers, self.sources, strict=True):
            results.append(layer(*(results[source] for source in sources)))
        return results[-1] if not self.outputs else [results[index] for index in self.outputs]


def classifier(channels: int, classes: int = 1000, *hidden: nn.Module) -> list[nn.Module]:
    """Mean over the positions, then a linear layer: [B, channels, H, W] → [B, classes]."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), *hidden, nn.Linear(channels, classes)]


def divisible(value: float, by: int = 8) -> int:
    """The multiple of ``by`` nearest to the value, never less than 90 % of it."""
    result = max(by, int(value + by / 2) // by * by)
    return result + by if result < 0.9 * value else result


# ResNet and its relatives


def bottleneck(
    inputs: int, middle: int, outputs: int, stride: int, groups: int = 1, first: bool = False, project: bool = False
) -> nn.Module:
    """1x1, 3x3, 1x1; the stride sits in the 3x3 (v1.5) or, with ``first``, in the first 1x1 (v1)."""
    body = nn.Sequential(
        conv(inputs, middle, 1, stride if first else 1),
        conv(middle, middle, 3, 1 if first else stride, groups),
        conv(middle, outputs, act=None),
    )
    return Residual(body, conv(inputs, outputs, 1, stride, act=None) if project else None, nn.ReLU())


def basic(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Two 3x3 convolutions and the shortcut."""
    body = nn.Sequential(conv(inputs, outputs, 3, stride), conv(outputs, outputs, 3, act=None))
    project = stride > 1 or inputs != outputs
    return Residual(body, conv(inputs, outputs, 1, stride, act=None) if project else None, nn.ReLU())


def resnet_stages(
    layers: Sequence[int],
    deep: bool,
    groups: int = 1,
    base: int = 64,
    first: bool = False,
    strides: Sequence[int] = (1, 2, 2, 2),
) -> list[nn.Module]:
    """The stem and the stages of a ResNet; ``base`` is the width of the first stage's 3x3."""
    stages: list[nn.Module] = [nn.Sequential(conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1))]
    inputs = 64
    for stage, count in enumerate(layers):
        blocks: list[nn.Module] = []
        outputs = 64 * 2**stage * (4 if deep else 1)
        for index in range(count):
            stride = strides[stage] if index == 0 else 1
            if deep:
                blocks.append(bottleneck(inputs, base * 2**stage, outputs, stride, groups, first, index == 0))
            else:
                blocks.append(basic(inputs, outputs, stride))
            inputs = outputs
        stages.append(nn.Sequential(*blocks))
    return stages


def resnet(layers: Sequence[int], deep: bool = True, base: int = 64, first: bool = False) -> nn.Module:
    """[B, 3, H, W] → [B, 1000]."""
    stages = resnet_stages(layers, deep, base=base, first=first)
    return nn.Sequential(*stages, *classifier(2048 if deep else 512))


class DenseLayer(nn.Module):
    """Adds 32 channels to its input; the normalisation before a convolution cannot be folded and stays."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU(), conv(inputs, 128), conv(128, 32, 3, act=None))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


def densenet121() -> nn.Module:
    """[B, 3, H, W] → [B, 1000]."""
    layers: list[nn.Module] = [conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, count in enumerate((6, 12, 24, 16)):
        if stage:
            layers += [nn.BatchNorm2d(channels), nn.ReLU(), conv(channels, channels // 2, act=None), nn.AvgPool2d(2)]
            channels //= 2
        for _ in range(count):
            layers.append(DenseLayer(channels))
            channels += 32
    return nn.Sequential(*layers, nn.BatchNorm2d(channels), nn.ReLU(), *classifier(channels))


# Mobile classifiers


def mobilenet_v1_stages(width: float) -> list[nn.Module]:
    """The 3x3 stem and the 13 depthwise separable blocks of MobileNetV1."""
    plan = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1)]
    channels = int(32 * width)
    blocks = [conv(3, channels, 3, 2, act=nn.ReLU6)]
    for outputs, stride in plan:
        blocks.append(separable(channels, int(outputs * width), 3, stride, nn.ReLU6))
        channels = int(outputs * width)
    return blocks


def mobilenet_v1(width: float = 1.0) -> nn.Module:
    """[B, 3, H, W] → [B, 1000]."""
    return nn.Sequential(*mobilenet_v1_stages(width), *classifier(int(1024 * width)))


def inverted(
    inputs: int,
    middle: int,
    outputs: int,
    kernel: int = 3,
    stride: int = 1,
    act: Activation = nn.ReLU6,
    squeeze: nn.Module | None = None,
) -> nn.Module:
    """Inverted residual: widen by a 1x1, depthwise, optionally squeeze and excite, narrow by a linear 1x1."""
    layers = [conv(inputs, middle, act=act)] if middle != inputs else []
    layers.append(conv(middle, middle, kernel, stride, middle, act))
    if squeeze is not None:
        layers.append(squeeze)
    layers.append(conv(middle, outputs, act=None))
    body = nn.Sequential(*layers)
    return Residual(body) if stride == 1 and inputs == outputs else body


def mobilenet_v2_stages(width: float) -> tuple[list[nn.Module], int]:
    """The stem, the 17 inverted residual blocks and the last 1x1; and the channels of that."""
    plan = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    channels = divisible(32 * width)
    blocks = [conv(3, channels, 3, 2, act=nn.ReLU6)]
    for factor, outputs, count, stride in plan:
        outputs = divisible(outputs * width)
        for index in range(count):
            step = stride if index == 0 else 1
            blocks.append(inverted(channels, channels * factor, outputs, 3, step))
            channels = outputs
    last = divisible(1280 * max(1.0, width))
    return [*blocks, conv(channels, last, act=nn.ReLU6)], last


def mobilenet_v2(width: float = 1.0) -> nn.Module:
    """[B, 3, H, W] → [B, 1000]."""
    blocks, channels = mobilenet_v2_stages(width)
    return nn.Sequential(*blocks, *classifier(channels))


# (kernel, widened channels, channels, squeeze and excitation, hard swish, stride)
V3_LARGE = (
    (3, 16, 16, 0, 0, 1), (3, 64, 24, 0, 0, 2), (3, 72, 24, 0, 0, 1), (5, 72, 40, 1, 0, 2), (5, 120, 40, 1, 0, 1),
    (5, 120, 40, 1, 0, 1), (3, 240, 80, 0, 1, 2), (3, 200, 80, 0, 1, 1), (3, 184, 80, 0, 1, 1), (3, 184, 80, 0, 1, 1),
    (3, 480, 112, 1, 1, 1), (3, 672, 112, 1, 1, 1), (5, 672, 160, 1, 1, 2), (5, 960, 160, 1, 1, 1),
    (5, 960, 160, 1, 1, 1),
)  # fmt: skip
V3_SMALL = (
    (3, 16, 16, 1, 0, 2), (3, 72, 24, 0, 0, 2), (3, 88, 24, 0, 0, 1), (5, 96, 40, 1, 1, 2), (5, 240, 40, 1, 1, 1),
    (5, 240, 40, 1, 1, 1), (5, 120, 48, 1, 1, 1), (5, 144, 48, 1, 1, 1), (5, 288, 96, 1, 1, 2), (5, 576, 96, 1, 1, 1),
    (5, 576, 96, 1, 1, 1),
)  # fmt: skip


def mobilenet_v3(plan: Sequence[tuple[int, ...]], hidden: int, minimal: bool = False) -> nn.Module:
    """[B, 3, H, W] → [B, 1000]; ``minimal`` leaves out squeeze and excitation, hard swish and 5x5 kernels."""
    swish: Activation = nn.ReLU if minimal else nn.Hardswish
    blocks = [conv(3, 16, 3, 2, act=swish)]
    channels = 16
    for kernel, middle, outputs, gated, swished, stride in plan:
        gate = Squeeze(middle, divisible(middle / 4), nn.ReLU, nn.Hardsigmoid) if gated and not minimal else None
        act: Activation = swish if swished else nn.ReLU
        blocks.append(inverted(channels, middle, outputs, 3 if minimal else kernel, stride, act, gate))
        channels = outputs
    last = channels * 6
    return nn.Sequential(
        *blocks, conv(channels, last, act=swish), *classifier(hidden, 1000, nn.Linear(last, hidden), swish())
    )


# (widening, channels, blocks, kernel, stride)
EFFICIENT = (
    (1, 16, 1, 3, 1), (6, 24, 2, 3, 2), (6, 40, 2, 5, 2), (6, 80, 3, 3, 2), (6, 112, 3, 5, 1), (6, 192, 4, 5, 2),
    (6, 320, 1, 3, 1),
)  # fmt: skip
MNAS = (
    (1, 16, 1, 3, 1), (3, 24, 3, 3, 2), (3, 40, 3, 5, 2), (6, 80, 3, 5, 2), (6, 96, 2, 3, 1), (6, 192, 4, 5, 2),
    (6, 320, 1, 3, 1),
)  # fmt: skip


def efficientnet_stages(
    plan: Sequence[tuple[int, ...]], width: float, depth: float, act: Activation, squeeze: bool, lite: bool
) -> tuple[list[nn.Module], list[int]]:
    """The stem and the stages, and the channels of each; ``lite`` leaves the stem and the outer stages' depth alone."""
    channels = 32 if lite else divisible(32 * width)
    stages, widths = [conv(3, channels, 3, 2, act=act)], [channels]
    for stage, (factor, outputs, count, kernel, stride) in enumerate(plan):
        outputs = divisible(outputs * width)
        outer = lite and stage in (0, len(plan) - 1)
        blocks = []
        for index in range(count if outer else math.ceil(count * depth)):
            middle = channels * factor
            gate = Squeeze(middle, max(1, channels // 4), act, nn.Sigmoid) if squeeze else None
            blocks.append(inverted(channels, middle, outputs, kernel, stride if index == 0 else 1, act, gate))
            channels = outputs
        stages.append(nn.Sequential(*blocks))
        widths.append(channels)
    return stages, widths


def efficientnet(
    plan: Sequence[tuple[int, ...]], width: float, depth: float, act: Activation, squeeze: bool, lite: bool
) -> nn.Module:
    """[B, 3, H, W] → [B, 1000]; ``lite`` does not scale the last 1x1 either."""
    stages, widths = efficientnet_stages(plan, width, depth, act, squeeze, lite)
    last = 1280 if lite else divisible(1280 * width)
    return nn.Sequential(*stages, conv(widths[-1], last, act=act), *classifier(last))


def lite(width: float, depth: float) -> nn.Module:
    """EfficientNet-Lite: [B, 3, H, W] → [B, 1000]."""
    return efficientnet(EFFICIENT, width, depth, nn.ReLU6, False, True)


class Shuffle(nn.Module):
    """Interleaves the channels of two groups."""

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        return x.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(batch, channels, height, width)


class ShuffleUnit(nn.Module):
    """ShuffleNetV2's unit; with stride 2 both branches see the whole input, else each sees half of the channels."""

    def __init__(self, inputs: int, outputs: int, stride: int, act: Activation) -> None:
        super().__init__()
        half = outputs // 2
        self.stride = stride
        self.left = (
            nn.Sequential(conv(inputs, inputs, 3, 2, inputs, None), conv(inputs, half, act=act))
            if stride == 2
            else nn.Identity()
        )
        self.right = nn.Sequential(
            conv(inputs if stride == 2 else half, half, act=act),
            conv(half, half, 3, stride, half, None),
            conv(half, half, act=act),
        )
        self.shuffle = Shuffle()

    def forward(self, x: Tensor) -> Tensor:
        left, right = (x, x) if self.stride == 2 else x.chunk(2, 1)
        joined: Tensor = self.shuffle(torch.cat([self.left(left), self.right(right)], 1))
        return joined


def shuffle_stages(act: Activation) -> list[nn.Module]:
    """The stem (24 channels, stride 4) and three stages (116, 232, 464 channels) of ShuffleNetV2 1.0x."""
    stages: list[nn.Module] = [nn.Sequential(conv(3, 24, 3, 2, act=act), nn.MaxPool2d(3, 2, 1))]
    channels = 24
    for outputs, count in ((116, 4), (232, 8), (464, 4)):
        units = [ShuffleUnit(channels, outputs, 2, act)]
        units += [ShuffleUnit(outputs, outputs, 1, act) for _ in range(count - 1)]
        stages.append(nn.Sequential(*units))
        channels = outputs
    return stages


def shufflenet_v2() -> nn.Module:
    """[B, 3, H, W] → [B, 1000]."""
    return nn.Sequential(*shuffle_stages(nn.ReLU), conv(464, 1024), *classifier(1024))


def fire(inputs: int, squeeze: int, expand: int) -> nn.Module:
    """SqueezeNet's fire module: a narrow 1x1, then a 1x1 and a 3x3 side by side."""
    return nn.Sequential(conv(inputs, squeeze), Branches(conv(squeeze, expand), conv(squeeze, expand, 3)))


def squeezenet(version: str) -> nn.Module:
    """[B, 3, H, W] → [B, 1000]."""
    stem, pools = (conv(3, 96, 7, 2, padding=0), (3, 7)) if version == "1.0" else (conv(3, 64, 3, 2, padding=0), (2, 4))
    layers = [stem, nn.MaxPool2d(3, 2, ceil_mode=True)]
    inputs = 96 if version == "1.0" else 64
    for index, (squeeze, expand) in enumerate(
        ((16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192), (64, 256), (64, 256))
    ):
        if index in pools:
            layers.append(nn.MaxPool2d(3, 2, ceil_mode=True))
        layers.append(fire(inputs, squeeze, expand))
        inputs = 2 * expand
    return nn.Sequential(*layers, conv(512, 1000), nn.AdaptiveAvgPool2d(1), nn.Flatten())


# Older classifiers


def vgg16() -> nn.Module:
    """[B, 3, H, W] → [B, 1000]; other sizes than 224 are pooled to 7x7 before the linear layers."""
    layers: list[nn.Module] = []
    inputs = 3
    for outputs, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers.append(conv(inputs, outputs, 3))
            inputs = outputs
        layers.append(nn.MaxPool2d(2))
    dense = [nn.Linear(25088, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(), *dense)


def alexnet() -> nn.Module:
    """Caffe's AlexNet, with two groups in three convolutions: [B, 3, 227, 227] → [B, 1000]."""
    norm = nn.LocalResponseNorm(5)
    return nn.Sequential(
        conv(3, 96, 11, 4, padding=0), norm, nn.MaxPool2d(3, 2), conv(96, 256, 5, 1, 2), norm, nn.MaxPool2d(3, 2),
        conv(256, 384, 3), conv(384, 384, 3, 1, 2), conv(384, 256, 3, 1, 2), nn.MaxPool2d(3, 2), nn.Flatten(),
        nn.Linear(9216, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000),
    )  # fmt: skip


def googlenet(large: int) -> nn.Module:
    """[B, 3, H, W] → [B, 1000]; ``large`` is the kernel of the third branch, 5 (Caffe) or 3 (TensorFlow).

    Caffe's has local response normalisation, TensorFlow's batch normalisation, which is folded.
    """
    plan: tuple[tuple[int, ...] | None, ...] = (
        (64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64), None,
        (192, 96, 208, 16, 48, 64), (160, 112, 224, 24, 64, 64), (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64), (256, 160, 320, 32, 128, 128), None,
        (256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128),
    )  # fmt: skip
    norm = [nn.LocalResponseNorm(5)] if large == 5 else []
    layers = [conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, ceil_mode=True), *norm, conv(64, 64), conv(64, 192, 3), *norm]
    layers.append(nn.MaxPool2d(3, 2, ceil_mode=True))
    inputs = 192
    for widths in plan:
        if widths is None:
            layers.append(nn.MaxPool2d(3, 2, ceil_mode=True))
            continue
        one, narrow, three, thin, five, pooled = widths
        layers.append(
            Branches(
                conv(inputs, one),
                nn.Sequential(conv(inputs, narrow), conv(narrow, three, 3)),
                nn.Sequential(conv(inputs, thin), conv(thin, five, large)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(inputs, pooled)),
            )
        )
        inputs = one + three + five + pooled
    return nn.Sequential(*layers, *classifier(1024))


def inception_v3() -> nn.Module:
    """[B, 3, 299, 299] → [B, 1000], without the auxiliary classifier."""

    def chain(inputs: int, *steps: tuple[Any, ...]) -> nn.Module:
        layers = []
        for outputs, *rest in steps:
            layers.append(conv(inputs, outputs, *rest))
            inputs = outputs
        return nn.Sequential(*layers)

    def mean(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(inputs, outputs))

    def fork(inputs: int, *steps: tuple[Any, ...]) -> nn.Module:
        ends = Branches(conv(384, 384, (1, 3)), conv(384, 384, (3, 1)))
        return nn.Sequential(chain(inputs, *steps), ends)

    def small(inputs: int, pooled: int) -> nn.Module:
        return Branches(
            conv(inputs, 64), chain(inputs, (48,), (64, 5)), chain(inputs, (64,), (96, 3), (96, 3)),
            mean(inputs, pooled),
        )  # fmt: skip

    def long(c: int) -> nn.Module:
        row, column = (1, 7), (7, 1)
        return Branches(
            conv(768, 192), chain(768, (c,), (c, row), (192, column)),
            chain(768, (c,), (c, column), (c, row), (c, column), (192, row)), mean(768, 192),
        )  # fmt: skip

    def wide(inputs: int) -> nn.Module:
        return Branches(conv(inputs, 320), fork(inputs, (384,)), fork(inputs, (448,), (384, 3)), mean(inputs, 192))

    def halved(inputs: int, outputs: int) -> nn.Module:
        return conv(inputs, outputs, 3, 2, padding=0)

    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 2), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), conv(32, 64, 3), nn.MaxPool2d(3, 2),
        conv(64, 80), nn.Conv2d(80, 192, 3), nn.ReLU(), nn.MaxPool2d(3, 2), small(192, 32), small(256, 64),
        small(288, 64),
        Branches(
            halved(288, 384), nn.Sequential(conv(288, 64), conv(64, 96, 3), halved(96, 96)),
            nn.MaxPool2d(3, 2),
        ),
        long(128), long(160), long(160), long(192),
        Branches(
            nn.Sequential(conv(768, 192), halved(192, 320)),
            nn.Sequential(chain(768, (192,), (192, (1, 7)), (192, (7, 1))), halved(192, 192)),
            nn.MaxPool2d(3, 2),
        ),
        wide(1280), wide(2048), *classifier(2048),
    )  # fmt: skip


# Blocks of the YOLO family


def silu(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> nn.Module:
    """A convolution with SiLU."""
    return conv(inputs, outputs, kernel, stride, groups, nn.SiLU)


def leaky(inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> nn.Module:
    """A convolution with a leaky ReLU."""
    return conv(inputs, outputs, kernel, stride, act=lambda: nn.LeakyReLU(0.1))


def narrow(
    channels: int, middle: int, kernels: tuple[int, int], shortcut: bool, conv2: Callable[..., nn.Module] = silu
) -> nn.Module:
    """Two convolutions, over ``middle`` channels, around which a shortcut may pass."""
    body = nn.Sequential(silu(channels, middle, kernels[0]), conv2(middle, channels, kernels[1]))
    return Residual(body) if shortcut else body


class Csp(nn.Module):
    """Cross stage partial block with three convolutions (C3, C3k, CSPLayer): one half passes the inner blocks."""

    def __init__(self, inputs: int, outputs: int, inner: Callable[[int], nn.Module], count: int) -> None:
        super().__init__()
        middle = outputs // 2
        self.left, self.right = silu(inputs, middle), silu(inputs, middle)
        self.inner = nn.Sequential(*(inner(middle) for _ in range(count)))
        self.last = silu(2 * middle, outputs)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.cat([self.inner(self.left(x)), self.right(x)], 1))
        return y


def c3(inputs: int, outputs: int, count: int = 1, shortcut: bool = True, kernels: tuple[int, int] = (1, 3)) -> Csp:
    """YOLOv5's block; kernels (3, 3) make it C3k."""
    return Csp(inputs, outputs, lambda middle: narrow(middle, middle, kernels, shortcut), count)


class C2f(nn.Module):
    """Keeps the results of all inner blocks: a 1x1 to two parts, ``count`` blocks in a chain, a 1x1 over all parts."""

    def __init__(self, inputs: int, outputs: int, count: int, inner: Callable[[int], nn.Module], part: int) -> None:
        super().__init__()
        self.first = silu(inputs, 2 * part)
        self.inner = nn.ModuleList(inner(part) for _ in range(count))
        self.last = silu((2 + count) * part, outputs)

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.first(x).chunk(2, 1))
        for block in self.inner:
            parts.append(block(parts[-1]))
        y: Tensor = self.last(torch.cat(parts, 1))
        return y


def c2f(inputs: int, outputs: int, count: int, shortcut: bool) -> C2f:
    """YOLOv8's block."""
    return C2f(inputs, outputs, count, lambda part: narrow(part, part, (3, 3), shortcut), outputs // 2)


def c3k2(inputs: int, outputs: int, count: int, deep: bool, ratio: float = 0.5, attend: bool = False) -> C2f:
    """YOLO11's block: the inner blocks are narrow bottlenecks or, with ``deep``, C3k; YOLO26 also has attention."""

    def inner(part: int) -> nn.Module:
        if attend:
            heads = max(part // 64, 1)
            return nn.Sequential(narrow(part, part // 2, (3, 3), True), *attention_block(part, heads))
        return c3(part, part, 2, True, (3, 3)) if deep else narrow(part, part // 2, (3, 3), True)

    return C2f(inputs, outputs, count, inner, int(outputs * ratio))


class Attention(nn.Module):
    """Self-attention over the positions, keys of half the heads' width, with a depthwise position encoding."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads, self.value = heads, channels // heads
        self.key = self.value // 2
        self.qkv = nn.Conv2d(channels, channels + 2 * self.key * heads, 1)
        self.position = nn.Conv2d(channels, channels, 3, 1, 1, groups=channels)
        self.last = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        qkv = self.qkv(x).view(batch, self.heads, 2 * self.key + self.value, height * width)
        q, k, v = qkv.split([self.key, self.key, self.value], 2)
        weights = ((q.transpose(-2, -1) @ k) * self.key**-0.5).softmax(-1)
        y = (v @ weights.transpose(-2, -1)).view(batch, channels, height, width)
        z: Tensor = self.last(y + self.position(v.reshape(batch, channels, height, width)))
        return z


def attention_block(channels: int, heads: int) -> tuple[nn.Module, nn.Module]:
    """Attention and a feed-forward pair of 1x1 convolutions, each with a shortcut."""
    feed = nn.Sequential(silu(channels, 2 * channels), conv(2 * channels, channels, act=None))
    return Residual(Attention(channels, heads)), Residual(feed)


class Psa(nn.Module):
    """Partial self-attention (PSA, C2PSA): half of the channels pass ``count`` attention blocks."""

    def __init__(self, channels: int, outputs: int, count: int = 1) -> None:
        super().__init__()
        half = channels // 2
        self.first, self.last = silu(channels, 2 * half), silu(2 * half, outputs)
        blocks = [block for _ in range(count) for block in attention_block(half, half // 64)]
        self.inner = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        kept, passed = self.first(x).chunk(2, 1)
        y: Tensor = self.last(torch.cat([kept, self.inner(passed)], 1))
        return y


class Pools(nn.Module):
    """A 1x1, three maxima in a chain (5, 5, 5) or side by side (5, 9, 13), joined, and a 1x1."""

    def __init__(
        self, inputs: int, outputs: int, middle: int, chain: bool, shortcut: bool = False, act: bool = True
    ) -> None:
        super().__init__()
        self.chain, self.shortcut = chain, shortcut
        self.first = silu(inputs, middle) if act else conv(inputs, middle, act=None)
        self.pools = nn.ModuleList(nn.MaxPool2d(k, 1, k // 2) for k in ((5, 5, 5) if chain else (5, 9, 13)))
        self.last = silu(4 * middle, outputs)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.first(x)]
        for pool in self.pools:
            parts.append(pool(parts[-1 if self.chain else 0]))
        y: Tensor = self.last(torch.cat(parts, 1))
        return y + x if self.shortcut else y


def sppf(inputs: int, outputs: int) -> Pools:
    """YOLOv5's and later spatial pyramid pooling."""
    return Pools(inputs, outputs, inputs // 2, True)


class Detect(nn.Module):
    """Anchor-free head: boxes as distributions over ``bins`` distances and class scores per position.

    Maps [B, C, H, W] of three strides to boxes [B, 4, N] and scores [B, classes, N]; ``light`` makes the class branch
    depthwise separable, and ``extra`` numbers further outputs per position (points of a pose, mask coefficients).
    """

    def __init__(
        self,
        widths: Sequence[int],
        light: bool,
        bins: int = 16,
        classes: int = 80,
        extra: int = 0,
        groups: int = 1,
    ) -> None:
        super().__init__()
        box, score = max(16, widths[0] // 4, bins * 4), max(widths[0], min(classes, 100))
        self.bins, self.classes = bins, classes
        self.boxes = nn.ModuleList(
            nn.Sequential(silu(width, box, 3), silu(box, box, 3, 1, groups), nn.Conv2d(box, 4 * bins, 1, groups=groups))
            for width in widths
        )
        self.scores = nn.ModuleList(
            nn.Sequential(
                *(
                    (separable(width, score, act=nn.SiLU), separable(score, score, act=nn.SiLU))
                    if light
                    else (silu(width, score, 3), silu(score, score, 3))
                ),
                nn.Conv2d(score, classes, 1),
            )
            for width in widths
        )
        more = max(widths[0] // 4, extra)
        self.more = nn.ModuleList(
            nn.Sequential(silu(width, more, 3), silu(more, more, 3), nn.Conv2d(more, extra, 1))
            for width in (widths if extra else ())
        )

    def forward(self, *levels: Tensor) -> list[Tensor]:
        box = torch.cat([head(x).flatten(2) for head, x in zip(self.boxes, levels, strict=True)], 2)
        score = torch.cat([head(x).flatten(2) for head, x in zip(self.scores, levels, strict=True)], 2)
        if self.bins > 1:
            batch, _, count = box.shape
            weights = box.view(batch, 4, self.bins, count).softmax(2)
            distances = torch.arange(self.bins, dtype=box.dtype, device=box.device)
            box = (weights * distances.view(1, 1, -1, 1)).sum(2)
        more = [head(x).flatten(2) for head, x in zip(self.more, levels, strict=True)] if len(self.more) else []
        return [box, score.sigmoid(), *([torch.cat(more, 2)] if more else [])]


class Proto(nn.Module):
    """Mask prototypes of a segmentation head: [B, C, H, W] → [B, masks, 2H, 2W]."""

    def __init__(self, inputs: int, middle: int, masks: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(
            silu(inputs, middle, 3), nn.ConvTranspose2d(middle, middle, 2, 2), silu(middle, middle, 3),
            silu(middle, masks),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y


class Scores(nn.Module):
    """One convolution per level and a sigmoid: the anchor-based heads of YOLOv3 to YOLOv7."""

    def __init__(self, widths: Sequence[int], outputs: int = 255) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Conv2d(width, outputs, 1) for width in widths)

    def forward(self, *levels: Tensor) -> list[Tensor]:
        return [head(x).sigmoid() for head, x in zip(self.heads, levels, strict=True)]


class Scale:
    """Depth and width multiples of one size of a YOLO, and the widest layer before scaling."""

    def __init__(self, depth: float, width: float, widest: int) -> None:
        self.depth, self.width, self.widest = depth, width, widest

    def channels(self, value: int) -> int:
        """Scaled channels, rounded up to a multiple of eight."""
        return -int(-min(value, self.widest) * self.width // 8) * 8

    def repeats(self, value: int) -> int:
        """Scaled repetitions, at least one."""
        return max(round(value * self.depth), 1)


def detector(net: Net, head: Callable[..., nn.Module], *levels: int, **options: Any) -> Net:
    """Append a head over three levels."""
    net.add(head([net.width[level] for level in levels], **options), 0, *levels)
    return net


def top_down(
    net: Net, block: Callable[[int, int], Any], p3: int, p4: int, p5: int, down: Sequence[Callable[..., nn.Module]]
) -> tuple[int, int, int]:
    """The path aggregation network of YOLOv8 to YOLO26; ``block(index, nominal channels)`` appends a block."""
    net.upsample()
    net.join(len(net.width) - 1, p4)
    middle = block(0, 512)
    net.upsample()
    net.join(len(net.width) - 1, p3)
    small = block(1, 256)
    net.block(down[0], net.width[small], 3, 2)
    net.join(len(net.width) - 1, middle)
    medium = block(2, 512)
    net.block(down[1], net.width[medium], 3, 2)
    net.join(len(net.width) - 1, p5)
    return small, medium, block(3, 1024)


def yolo_v8(depth: float, width: float, widest: int) -> nn.Module:
    """[B, 3, H, W] → boxes and scores."""
    net, scale = Net(), Scale(depth, width, widest)
    net.block(silu, scale.channels(64), 3, 2)
    levels = []
    for channels, count in ((128, 3), (256, 6), (512, 6), (1024, 3)):
        net.block(silu, scale.channels(channels), 3, 2)
        levels.append(net.block(c2f, scale.channels(channels), scale.repeats(count), True))
    top = net.block(sppf, scale.channels(1024))

    def block(_: int, channels: int) -> int:
        return net.block(c2f, scale.channels(channels), scale.repeats(3), False)

    return detector(net, Detect, *top_down(net, block, levels[1], levels[2], top, (silu, silu)), light=False)


def spaced(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Module:
    """YOLOv10's downsampling: a 1x1, then a linear depthwise convolution."""
    return nn.Sequential(silu(inputs, outputs), conv(outputs, outputs, kernel, stride, outputs, None))


def c2f_cib(inputs: int, outputs: int, count: int, shortcut: bool, large: bool) -> C2f:
    """C2f over compact inverted blocks; ``large`` has a 7x7 depthwise kernel in the middle."""

    def inner(part: int) -> nn.Module:
        body = nn.Sequential(
            silu(part, part, 3, 1, part), silu(part, 2 * part),
            silu(2 * part, 2 * part, 7 if large else 3, 1, 2 * part), silu(2 * part, part),
            silu(part, part, 3, 1, part),
        )  # fmt: skip
        return Residual(body) if shortcut else body

    return C2f(inputs, outputs, count, inner, outputs // 2)


def yolo_v10(size: str) -> nn.Module:
    """[B, 3, H, W] → boxes and scores, of the one-to-one head that inference keeps."""
    depth, width, widest = {"n": (0.33, 0.25, 1024), "s": (0.33, 0.5, 1024), "m": (0.67, 0.75, 768)}[size]
    net, scale = Net(), Scale(depth, width, widest)
    net.block(silu, scale.channels(64), 3, 2)
    levels = []
    for channels, count in ((128, 3), (256, 6), (512, 6), (1024, 3)):
        net.block(spaced if channels > 256 else silu, scale.channels(channels), 3, 2)
        outputs, repeats = scale.channels(channels), scale.repeats(count)
        if channels == 1024 and size != "n":
            levels.append(net.block(c2f_cib, outputs, repeats, True, size == "s"))
        else:
            levels.append(net.block(c2f, outputs, repeats, True))
    net.block(sppf, scale.channels(1024))
    top = net.block(Psa, scale.channels(1024))

    def block(index: int, channels: int) -> int:
        outputs, repeats = scale.channels(channels), scale.repeats(3)
        if index == 3 or (index == 2 and size == "m"):
            return net.block(c2f_cib, outputs, repeats, True, size != "m")
        return net.block(c2f, outputs, repeats, False)

    return detector(net, Detect, *top_down(net, block, levels[1], levels[2], top, (silu, spaced)), light=True)


YOLO11_SIZES = {
    "n": (0.5, 0.25, 1024), "s": (0.5, 0.5, 1024), "m": (0.5, 1.0, 512), "l": (1.0, 1.0, 512), "x": (1.0, 1.5, 512),
}  # fmt: skip


def yolo_11(size: str, task: str = "detect", later: bool = False) -> nn.Module:
    """[B, 3, H, W] → boxes and scores, and for other tasks points, masks or one class; ``later`` is YOLO26."""
    net, scale = Net(), Scale(*YOLO11_SIZES[size])
    large = size in "mlx"  # these sizes have the deep inner block everywhere
    net.block(silu, scale.channels(64), 3, 2)
    levels = []
    for down, channels, deep, ratio in (
        (128, 256, False, 0.25), (256, 512, False, 0.25), (512, 512, True, 0.5), (1024, 1024, True, 0.5),
    ):  # fmt: skip
        net.block(silu, scale.channels(down), 3, 2)
        levels.append(net.block(c3k2, scale.channels(channels), scale.repeats(2), deep or large, ratio))
    top = scale.channels(1024)
    if task == "classify":
        net.block(Psa, top, scale.repeats(2))
        net.block(silu, 1280)
        net.add(nn.Sequential(*classifier(1280)), 1000)
        return net
    if later:
        net.add(Pools(top, top, top // 2, True, True, False), top)
    else:
        net.block(sppf, top)
    last = net.block(Psa, top, scale.repeats(2))

    def block(index: int, channels: int) -> int:
        outputs = scale.channels(channels)
        if index == 3 and later:
            return net.block(c3k2, outputs, 1, True, 0.5, True)
        return net.block(c3k2, outputs, scale.repeats(2), later or large or index == 3)

    heads = top_down(net, block, levels[1], levels[2], last, (silu, silu))
    if task == "pose":
        return detector(net, Detect, *heads, light=True, classes=1, extra=51)
    detector(net, Detect, *heads, light=True, bins=1 if later else 16, extra=32 if task == "segment" else 0)
    if task == "segment":
        boxes = len(net.width) - 1
        masks = net.add(Proto(net.width[heads[0]], scale.channels(256)), 32, heads[0])
        net.outputs = (boxes, masks)
    return net


def yolo_v5(depth: float, width: float) -> nn.Module:
    """[B, 3, H, W] → three maps of 255 channels (version 6)."""
    net, scale = Net(), Scale(depth, width, 1024)
    net.add(conv(3, scale.channels(64), 6, 2, act=nn.SiLU, padding=2), scale.channels(64))
    levels = []
    for channels, count in ((128, 3), (256, 6), (512, 9), (1024, 3)):
        net.block(silu, scale.channels(channels), 3, 2)
        levels.append(net.block(c3, scale.channels(channels), scale.repeats(count)))
    net.block(sppf, scale.channels(1024))
    return detector(net, Scores, *pyramid_c3(net, scale, levels))


def pyramid_c3(net: Net, scale: Scale, levels: Sequence[int], down: Callable[..., nn.Module] = silu) -> list[int]:
    """The path aggregation network of YOLOv5 and YOLOX after the last level."""
    kept, repeats = [], scale.repeats(3)
    for channels, level in ((512, levels[2]), (256, levels[1])):
        kept.append(net.block(silu, scale.channels(channels)))
        net.upsample()
        net.join(len(net.width) - 1, level)
        net.block(c3 if down is silu else c3_light, scale.channels(channels), repeats, False)
    heads = [len(net.width) - 1]
    for channels, lateral in ((256, kept[1]), (512, kept[0])):
        net.block(down, scale.channels(channels), 3, 2)
        net.join(len(net.width) - 1, lateral)
        heads.append(net.block(c3 if down is silu else c3_light, scale.channels(2 * channels), repeats, False))
    return heads


def silu_separable(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Module:
    """A depthwise and a pointwise convolution with SiLU."""
    return separable(inputs, outputs, kernel, stride, nn.SiLU)


def c3_light(inputs: int, outputs: int, count: int = 1, shortcut: bool = True) -> Csp:
    """YOLOX-Nano's block: its 3x3 convolutions are depthwise separable."""
    return Csp(inputs, outputs, lambda middle: narrow(middle, middle, (1, 3), shortcut, silu_separable), count)


class Focus(nn.Module):
    """Moves each 2x2 square into the channels: [B, C, H, W] → [B, 4C, H/2, W/2]."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]], 1)


class Decoupled(nn.Module):
    """YOLOX's head: boxes, objectness and classes from two chains of convolutions: → [B, 85, N]."""

    def __init__(self, widths: Sequence[int], middle: int, conv3: Callable[..., nn.Module]) -> None:
        super().__init__()

        def pair() -> nn.Module:
            return nn.Sequential(conv3(middle, middle, 3), conv3(middle, middle, 3))

        self.stems = nn.ModuleList(silu(width, middle) for width in widths)
        self.left, self.right = nn.ModuleList(pair() for _ in widths), nn.ModuleList(pair() for _ in widths)
        self.scores = nn.ModuleList(nn.Conv2d(middle, 80, 1) for _ in widths)
        self.boxes = nn.ModuleList(nn.Conv2d(middle, 4, 1) for _ in widths)
        self.objects = nn.ModuleList(nn.Conv2d(middle, 1, 1) for _ in widths)

    def forward(self, *levels: Tensor) -> Tensor:
        results = []
        for index, level in enumerate(levels):
            x = self.stems[index](level)
            left, right = self.left[index](x), self.right[index](x)
            scores = self.scores[index](left).sigmoid()
            parts = [self.boxes[index](right), self.objects[index](right).sigmoid(), scores]
            results.append(torch.cat(parts, 1).flatten(2))
        return torch.cat(results, 2)


def yolo_x(depth: float, width: float, light: bool = False) -> nn.Module:
    """[B, 3, H, W] → [B, 85, N]."""
    net, scale = Net(), Scale(depth, width, 1024)
    conv3, block = (silu_separable, c3_light) if light else (silu, c3)
    net.add(Focus(), 12)
    net.block(silu, scale.channels(64), 3)
    levels = []
    for channels, count in ((128, 3), (256, 9), (512, 9)):
        net.block(conv3, scale.channels(channels), 3, 2)
        levels.append(net.block(block, scale.channels(channels), scale.repeats(count)))
    top = scale.channels(1024)
    net.block(conv3, top, 3, 2)
    net.add(Pools(top, top, top // 2, False), top)
    net.block(block, top, scale.repeats(3), False)
    return detector(net, Decoupled, *pyramid_c3(net, scale, levels, conv3), middle=scale.channels(256), conv3=conv3)


def gelan(inputs: int, outputs: int, first: int, part: int, count: int) -> nn.Module:
    """YOLOv9's block (RepNCSPELAN4, re-parametrised): two halves, two chains of C3 and 3x3, all four joined."""

    def chain(channels: int) -> nn.Module:
        return nn.Sequential(c3(channels, part, count, True, (3, 3)), silu(part, part, 3))

    return Elan(inputs, outputs, first, part, chain(first // 2), chain(part))


class Elan(nn.Module):
    """A 1x1 to two halves, two blocks in a chain after the second half, all four results joined, a 1x1."""

    def __init__(self, inputs: int, outputs: int, first: int, part: int, one: nn.Module, two: nn.Module) -> None:
        super().__init__()
        self.first, self.one, self.two = silu(inputs, first), one, two
        self.last = silu(first + 2 * part, outputs)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.first(x).chunk(2, 1)
        one = self.one(right)
        y: Tensor = self.last(torch.cat([left, right, one, self.two(one)], 1))
        return y


def halve(inputs: int, outputs: int, kernel: int = 3, stride: int = 2) -> nn.Module:
    """YOLOv9's downsampling: a mean over 2x2 with stride 1, then a 3x3 with stride 2."""
    return nn.Sequential(nn.AvgPool2d(2, 1), silu(inputs, outputs, kernel, stride))


def yolo_v9(size: str) -> nn.Module:
    """[B, 3, H, W] → boxes and scores."""
    # stem, four backbone blocks, the narrower two of the upward path's downsamplings, repetitions
    stem, widths, down, count = {
        "t": (16, (32, 64, 96, 128), (48, 64), 3), "s": (32, (64, 128, 192, 256), (96, 128), 3),
        "m": (32, (128, 240, 360, 480), (184, 240), 1),
    }[size]  # fmt: skip
    net = Net()
    net.block(silu, stem, 3, 2)
    net.block(silu, stem * 2, 3, 2)
    levels = []
    for index, width in enumerate(widths):
        if index:
            net.block(halve, width)
        if index == 0 and size != "m":
            part = width // 2
            net.add(Elan(width, width, width, part, silu(part, part, 3), silu(part, part, 3)), width)
        else:
            net.block(gelan, width, width, width // 2, count)
        levels.append(len(net.width) - 1)
    top = net.add(Pools(widths[3], widths[3], widths[3] // 2, True), widths[3])
    _, small, medium, large = widths

    def block(width: int, *sources: int) -> int:
        net.join(*sources)
        return net.block(gelan, width, width, width // 2, count)

    middle = block(medium, net.upsample(), levels[2])
    first = block(small, net.upsample(), levels[1])
    second = block(medium, net.block(halve, down[0]), middle)
    third = block(large, net.block(halve, down[1]), top)
    return detector(net, Detect, first, second, third, light=False, groups=4)


def elan_v7(
    net: Net, width: int, inner: int, outputs: int, act: Callable[..., nn.Module], plan: Sequence[int], count: int = 4
) -> int:
    """YOLOv7's block: two 1x1 and ``count`` 3x3 in a chain; the results that ``plan`` counts from the end, joined."""
    source = len(net.width) - 1
    net.block(act, width)
    net.block(act, width, source=source)
    for _ in range(count):
        net.block(act, inner, 3)
    last = len(net.width)
    net.join(*(last - back for back in plan))
    return net.block(act, outputs)


def pooled_v7(net: Net, width: int, *sources: int) -> int:
    """YOLOv7's downsampling: a maximum with a 1x1 beside a 1x1 with a strided 3x3, joined with earlier results."""
    source = len(net.width) - 1
    net.add(nn.MaxPool2d(2), net.width[source])
    left = net.block(silu, width)
    net.block(silu, width, source=source)
    right = net.block(silu, width, 3, 2)
    return net.join(right, left, *sources)


def yolo_v7() -> nn.Module:
    """[B, 3, H, W] → three maps of 255 channels; RepConv is one 3x3 after re-parametrisation."""
    net = Net()
    for width, stride in ((32, 1), (64, 2), (64, 1), (128, 2)):
        net.block(silu, width, 3, stride)
    plan, wide = (1, 3, 5, 6), (1, 2, 3, 4, 5, 6)
    levels = [elan_v7(net, 64, 64, 256, silu, plan)]
    for down, width, outputs in ((128, 128, 512), (256, 256, 1024), (512, 256, 1024)):
        pooled_v7(net, down)
        levels.append(elan_v7(net, width, width, outputs, silu, plan))
    source = levels[3]
    for width, kernel in ((512, 1), (512, 3), (512, 1)):
        net.block(silu, width, kernel)
    start = len(net.width) - 1
    pools = [net.add(nn.MaxPool2d(k, 1, k // 2), 512, start) for k in (5, 9, 13)]
    net.join(start, *pools)
    net.block(silu, 512)
    right = net.block(silu, 512, 3)
    net.join(right, net.block(silu, 512, source=source))
    top = net.block(silu, 512)

    def up(width: int, level: int) -> int:
        net.block(silu, width)
        raised = net.upsample()
        net.join(net.block(silu, width, source=level), raised)
        return elan_v7(net, width, width // 2, width, silu, wide)

    middle = up(256, levels[2])
    small = up(128, levels[1])
    pooled_v7(net, 128, middle)
    medium = elan_v7(net, 256, 128, 256, silu, wide)
    pooled_v7(net, 256, top)
    large = elan_v7(net, 512, 256, 512, silu, wide)
    heads = [net.block(silu, 2 * net.width[level], 3, source=level) for level in (small, medium, large)]
    return detector(net, Scores, *heads)


def yolo_v7_tiny() -> nn.Module:
    """[B, 3, H, W] → three maps of 255 channels."""
    net = Net()
    net.block(leaky, 32, 3, 2)
    net.block(leaky, 64, 3, 2)
    plan = (1, 2, 3, 4)
    levels = []
    for index, width in enumerate((32, 64, 128, 256)):
        if index:
            net.add(nn.MaxPool2d(2), net.width[-1])
        levels.append(elan_v7(net, width, width, 2 * width, leaky, plan, 2))
    left = net.block(leaky, 256)
    start = net.block(leaky, 256, source=levels[3])
    pools = [net.add(nn.MaxPool2d(k, 1, k // 2), 256, start) for k in (5, 9, 13)]
    net.join(start, *pools)
    net.join(net.block(leaky, 256), left)
    top = net.block(leaky, 256)

    def up(width: int, level: int) -> int:
        net.block(leaky, width)
        raised = net.upsample()
        net.join(net.block(leaky, width, source=level), raised)
        return elan_v7(net, width // 2, width // 2, width, leaky, plan, 2)

    def down(width: int, other: int) -> int:
        net.join(net.block(leaky, width, 3, 2), other)
        return elan_v7(net, width // 2, width // 2, width, leaky, plan, 2)

    middle = up(128, levels[2])
    small = up(64, levels[1])
    medium = down(128, middle)
    large = down(256, top)
    heads = [net.block(leaky, 2 * net.width[level], 3, source=level) for level in (small, medium, large)]
    return detector(net, Scores, *heads)


class Half(nn.Module):
    """The second half of the channels."""

    def forward(self, x: Tensor) -> Tensor:
        return x.chunk(2, 1)[1]


def yolo_v4_tiny() -> nn.Module:
    """[B, 3, H, W] → two maps of 255 channels."""
    net = Net()
    net.block(leaky, 32, 3, 2)
    net.block(leaky, 64, 3, 2)
    lateral = 0
    for width in (64, 128, 256):
        whole = net.block(leaky, width, 3)
        net.add(Half(), width // 2)
        first = net.block(leaky, width // 2, 3)
        second = net.block(leaky, width // 2, 3)
        net.join(second, first)
        lateral = net.block(leaky, width)
        net.join(whole, lateral)
        net.add(nn.MaxPool2d(2), 2 * width)
    net.block(leaky, 512, 3)
    thin = net.block(leaky, 256)
    large = net.block(leaky, 512, 3)
    net.block(leaky, 128, source=thin)
    net.join(net.upsample(), lateral)
    small = net.block(leaky, 256, 3)
    return detector(net, Scores, large, small)


def yolo_v3_tiny() -> nn.Module:
    """[B, 3, H, W] → two maps of 255 channels."""
    net = Net()
    lateral = 0
    for width in (16, 32, 64, 128, 256):
        lateral = net.block(leaky, width, 3)
        net.add(nn.MaxPool2d(2), width)
    net.block(leaky, 512, 3)
    net.add(nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.MaxPool2d(2, 1)), 512)
    net.block(leaky, 1024, 3)
    thin = net.block(leaky, 256)
    large = net.block(leaky, 512, 3)
    net.block(leaky, 128, source=thin)
    net.join(net.upsample(), lateral)
    small = net.block(leaky, 256, 3)
    return detector(net, Scores, large, small)


# Other detectors


class SsdHead(nn.Module):
    """Boxes and classes of every level, joined: [B, C, H, W] of each level → [B, N, 4] and [B, N, classes].

    ``heads`` holds one module for the boxes and one for the classes per level.
    """

    def __init__(self, heads: Sequence[tuple[nn.Module, nn.Module]], classes: int, act: nn.Module) -> None:
        super().__init__()
        self.boxes = nn.ModuleList(box for box, _ in heads)
        self.scores = nn.ModuleList(score for _, score in heads)
        self.classes, self.act = classes, act

    def forward(self, *levels: Tensor) -> list[Tensor]:
        results = []
        for heads, size in ((self.boxes, 4), (self.scores, self.classes)):
            flat = [
                head(x).permute(0, 2, 3, 1).reshape(x.shape[0], -1, size) for head, x in zip(heads, levels, strict=True)
            ]
            results.append(torch.cat(flat, 1))
        return [results[0], self.act(results[1])]


def ssd_mobilenet(
    blocks: Sequence[nn.Module], widths: Sequence[int], first: int, last: int, classes: int, *, caffe: bool = False
) -> nn.Module:
    """SSD over a chain of blocks: levels after block ``first`` and the last, then four strided pairs.

    ``widths`` are the channels of these two levels; Caffe's decides by softmax, TensorFlow's by sigmoid.
    """
    net = Net()
    act: Activation = nn.ReLU if caffe else nn.ReLU6
    for index, block in enumerate(blocks):
        net.add(block, widths[0] if index <= first else widths[1])
    levels = [first + 1, len(net.width) - 1]
    for outputs in (last, last // 2, last // 2, last // 4):
        net.block(lambda i, o: conv(i, o, act=act), outputs // 2)
        levels.append(net.block(lambda i, o: conv(i, o, 3, 2, act=act), outputs))
    heads = []
    for index, level in enumerate(levels):
        anchors, width = 3 if index == 0 else 6, net.width[level]
        heads.append((nn.Conv2d(width, 4 * anchors, 1), nn.Conv2d(width, classes * anchors, 1)))
    net.add(SsdHead(heads, classes, nn.Softmax(-1) if caffe else nn.Sigmoid()), 0, *levels)
    return net


def ssd_mobilenet_v1(classes: int = 91, caffe: bool = False, width: float = 1.0) -> nn.Module:
    """[B, 3, 300, 300] → boxes [B, 1917, 4] and scores [B, 1917, classes]."""
    widths = (int(512 * width), int(1024 * width))
    return ssd_mobilenet(mobilenet_v1_stages(width), widths, 11, 512, classes, caffe=caffe)


def ssd_mobilenet_v2(light: bool) -> nn.Module:
    """[B, 3, 300, 300] → boxes [B, 1917, 4] and scores [B, 1917, 91]; ``light`` (SSDLite) predicts separably."""

    def predictor(inputs: int, outputs: int) -> nn.Module:
        if light:
            return nn.Sequential(conv(inputs, inputs, 3, 1, inputs, nn.ReLU6), nn.Conv2d(inputs, outputs, 1))
        return nn.Conv2d(inputs, outputs, 3, 1, 1)

    blocks, last = mobilenet_v2_stages(1.0)
    # The first level is the widened input of the last strided block.
    split = list(blocks[14].children())
    net = Net()
    net.add(nn.Sequential(*blocks[:14], split[0]), 576)
    net.add(nn.Sequential(*split[1:], *blocks[15:]), last)
    levels = [1, 2]
    for outputs in (512, 256, 256, 128):
        net.block(lambda i, o: conv(i, o, act=nn.ReLU6), outputs // 2)
        levels.append(net.block(lambda i, o: separable(i, o, 3, 2, nn.ReLU6), outputs))
    heads = []
    for index, level in enumerate(levels):
        anchors, width = 3 if index == 0 else 6, net.width[level]
        heads.append((predictor(width, 4 * anchors), predictor(width, 91 * anchors)))
    net.add(SsdHead(heads, 91, nn.Sigmoid()), 0, *levels)
    return net


def ssd_resnet34() -> nn.Module:
    """MLPerf's SSD: [B, 3, 1200, 1200] → boxes [B, 15130, 4] and scores [B, 15130, 81]."""
    net = Net()
    for index, stage in enumerate(resnet_stages((3, 4, 6), False, strides=(1, 2, 1))):
        net.add(stage, (64, 64, 128, 256)[index])
    levels = [len(net.width) - 1]
    for middle, outputs, stride, padding in (
        (256, 512, 2, 1), (256, 512, 2, 1), (128, 256, 2, 1), (128, 256, 2, 0), (128, 256, 1, 0),
    ):  # fmt: skip
        net.block(conv, middle)
        levels.append(net.add(conv(middle, outputs, 3, stride, padding=padding), outputs))
    heads = []
    for level, anchors in zip(levels, (4, 6, 6, 6, 4, 4), strict=True):
        box, score = (nn.Conv2d(net.width[level], anchors * size, 3, 3, 1) for size in (4, 81))
        heads.append((box, score))
    net.add(SsdHead(heads, 81, nn.Softmax(-1)), 0, *levels)
    return net


class FeaturePyramid(nn.Module):
    """Top-down sums of 1x1 laterals: three maps [B, Cᵢ, H, W] → three maps [B, channels, H, W]."""

    def __init__(self, widths: Sequence[int], channels: int, mode: str, smooth: bool, back: bool) -> None:
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(width, channels, 1) for width in widths)
        self.smooth = nn.ModuleList(nn.Conv2d(channels, channels, 3, 1, 1) for _ in (widths if smooth else ()))
        self.mode, self.back = mode, back

    def resize(self, x: Tensor, like: Tensor) -> Tensor:
        """``x`` at the height and width of ``like``."""
        return functional.interpolate(x, size=like.shape[-2:], mode=self.mode)

    def forward(self, *levels: Tensor) -> list[Tensor]:
        maps = [lateral(x) for lateral, x in zip(self.lateral, levels, strict=True)]
        for index in range(len(maps) - 1, 0, -1):
            maps[index - 1] = maps[index - 1] + self.resize(maps[index], maps[index - 1])
        for index in range(len(maps) - 1 if self.back else 0):
            maps[index + 1] = maps[index + 1] + self.resize(maps[index], maps[index + 1])
        return [layer(x) for layer, x in zip(self.smooth, maps, strict=True)] if len(self.smooth) else maps


class NanoDet(nn.Module):
    """[B, 3, H, W] → [B, N, 112]: 80 classes and four distributions over eight distances."""

    def __init__(self) -> None:
        super().__init__()

        def act() -> nn.Module:
            return nn.LeakyReLU(0.1)

        self.stages = nn.ModuleList(shuffle_stages(act))
        self.pyramid = FeaturePyramid((116, 232, 464), 96, "bilinear", False, True)
        self.heads = nn.ModuleList(
            nn.Sequential(separable(96, 96, act=act), separable(96, 96, act=act), nn.Conv2d(96, 112, 1))
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        levels = []
        for stage in self.stages:
            x = stage(x)
            levels.append(x)
        maps = self.pyramid(*levels[1:])
        return torch.cat([head(x).flatten(2) for head, x in zip(self.heads, maps, strict=True)], 2).transpose(1, 2)


class RetinaNet(nn.Module):
    """[B, 3, H, W] → boxes [B, N, 4] and scores [B, N, classes], nine anchors at each position of five levels."""

    def __init__(self, groups: int, base: int, classes: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList(resnet_stages((3, 4, 6, 3), True, groups, base))
        self.pyramid = FeaturePyramid((512, 1024, 2048), 256, "nearest", True, False)
        self.more = nn.ModuleList((nn.Conv2d(256, 256, 3, 2, 1), nn.Conv2d(256, 256, 3, 2, 1)))

        def chain(outputs: int) -> nn.Module:
            return nn.Sequential(*(conv(256, 256, 3) for _ in range(4)), nn.Conv2d(256, outputs, 3, 1, 1))

        # One head for all levels.
        box, score = chain(36), chain(9 * classes)
        self.head = SsdHead([(box, score)] * 5, classes, nn.Sigmoid())

    def forward(self, x: Tensor) -> Any:
        levels = []
        for stage in self.stages:
            x = stage(x)
            levels.append(x)
        maps = self.pyramid(*levels[2:])
        maps.append(self.more[0](maps[-1]))
        maps.append(self.more[1](maps[-1].relu()))
        return self.head(*maps)


class Fuse(nn.Module):
    """Sums maps of one size, then an activation and a separable convolution: n times [B, C, H, W] → [B, C, H, W]."""

    def __init__(self, channels: int, act: Activation) -> None:
        super().__init__()
        self.after = nn.Sequential(act(), plain_separable(channels, channels))

    def forward(self, *maps: Tensor) -> Tensor:
        total = maps[0]
        for other in maps[1:]:
            total = total + other
        y: Tensor = self.after(total)
        return y


def plain_separable(inputs: int, outputs: int) -> nn.Module:
    """A depthwise 3x3 without bias and a pointwise convolution, with no activation between or after."""
    return nn.Sequential(nn.Conv2d(inputs, inputs, 3, 1, 1, groups=inputs, bias=False), nn.Conv2d(inputs, outputs, 1))


class BiFpn(nn.Module):
    """One cell of EfficientDet's pyramid: five maps, finest first, down and up again.

    The first cell (``widths`` given) brings the backbone's three maps to ``channels`` and takes two of them twice.
    The weights of the weighted sums are constants at inference and folded here.
    """

    def __init__(self, channels: int, act: Activation, widths: Sequence[int] = ()) -> None:
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(width, channels, 1) for width in widths)
        self.again = nn.ModuleList(nn.Conv2d(width, channels, 1) for width in widths[1:])
        self.down = nn.ModuleList(Fuse(channels, act) for _ in range(4))
        self.up = nn.ModuleList(Fuse(channels, act) for _ in range(4))
        self.pool = nn.MaxPool2d(3, 2, 1)

    def forward(self, levels: Sequence[Tensor]) -> list[Tensor]:
        first, second = list(levels), list(levels)
        for index, layer in enumerate(self.lateral):
            first[index] = layer(levels[index])
        for index, layer in enumerate(self.again, 1):
            second[index] = layer(levels[index])
        middle = list(first)
        for index in range(3, -1, -1):
            size = first[index].shape[-2:]
            middle[index] = self.down[index](first[index], functional.interpolate(middle[index + 1], size=size))
        results = [middle[0]]
        for index in range(1, 5):
            parts = [second[index], middle[index]] if index < 4 else [second[index]]
            results.append(self.up[index - 1](*parts, self.pool(results[-1])))
        return results


class EfficientDet(nn.Module):
    """[B, 3, H, W] → boxes [B, N, 4] and scores [B, N, 90], nine anchors at each position of five levels.

    The levels share the convolutions of the heads; each has its own normalisation, which is folded.
    """

    def __init__(self, width: float, depth: float, channels: int, cells: int, repeats: int, lite: bool) -> None:
        super().__init__()
        act: Activation = nn.ReLU6 if lite else nn.SiLU
        stages, widths = efficientnet_stages(EFFICIENT, width, depth, act, not lite, lite)
        self.stages = nn.ModuleList(stages)
        self.sixth = nn.Conv2d(widths[7], channels, 1)
        self.pool = nn.MaxPool2d(3, 2, 1)
        maps = (widths[3], widths[5], widths[7])
        self.cells = nn.ModuleList(BiFpn(channels, act, () if index else maps) for index in range(cells))

        def chain(outputs: int) -> nn.Module:
            layers = [layer for _ in range(repeats) for layer in (plain_separable(channels, channels), act())]
            return nn.Sequential(*layers, plain_separable(channels, outputs))

        self.head = SsdHead([(chain(36), chain(810))] * 5, 90, nn.Sigmoid())

    def forward(self, x: Tensor) -> Any:
        results = []
        for stage in self.stages:
            x = stage(x)
            results.append(x)
        levels = [results[3], results[5], results[7]]
        levels.append(self.pool(self.sixth(x)))
        levels.append(self.pool(levels[-1]))
        for cell in self.cells:
            levels = cell(levels)
        return self.head(*levels)


# Transformers and modern convolutional networks, from the library that defines them


class Logits(nn.Module):
    """Passes the images to a classification model and returns its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(pixel_values=x).logits
        return logits


def convnext(depths: Sequence[int], widths: Sequence[int]) -> nn.Module:
    """[B, 3, H, W] → [B, 1000]."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    options: dict[str, Any] = {"depths": list(depths), "hidden_sizes": list(widths), "num_labels": 1000}
    return Logits(ConvNextForImageClassification(ConvNextConfig(**options)))


def swin_tiny() -> nn.Module:
    """[B, 3, 224, 224] → [B, 1000]."""
    from transformers import SwinConfig, SwinForImageClassification

    options: dict[str, Any] = {"num_labels": 1000}  # the defaults are Swin-T
    return Logits(SwinForImageClassification(SwinConfig(**options)))


def vit(hidden: int, layers: int, heads: int, patch: int, image: int) -> nn.Module:
    """[B, 3, image, image] → [B, 1000]."""
    from transformers import ViTConfig, ViTForImageClassification

    options: dict[str, Any] = {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "intermediate_size": 4 * hidden, "patch_size": patch, "image_size": image, "num_labels": 1000,
        "attn_implementation": "eager",  # the products of the attention appear as operators of their own
    }  # fmt: skip
    return Logits(ViTForImageClassification(ViTConfig(**options)))


class MixerBlock(nn.Module):
    """[B, tokens, hidden] → the same shape: a feed-forward pair across the tokens, one across the channels."""

    def __init__(self, tokens: int, hidden: int, inner: int, outer: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.across = nn.Sequential(nn.Linear(tokens, inner), nn.GELU(), nn.Linear(inner, tokens))
        self.within = nn.Sequential(nn.Linear(hidden, outer), nn.GELU(), nn.Linear(outer, hidden))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        y: Tensor = x + self.within(self.norm2(x))
        return y


class Tokens(nn.Module):
    """[B, C, H, W] → [B, H·W, C]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2)


class TokenMean(nn.Module):
    """[B, tokens, C] → [B, C]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def mixer() -> nn.Module:
    """MLP-Mixer B/16: [B, 3, 224, 224] → [B, 1000]."""
    blocks = (MixerBlock(196, 768, 384, 3072) for _ in range(12))
    return nn.Sequential(
        nn.Conv2d(3, 768, 16, 16), Tokens(), *blocks, nn.LayerNorm(768), TokenMean(), nn.Linear(768, 1000)
    )


# The table of networks


RECIPES: dict[str, Recipe] = {
    "resnet18": lambda: resnet((2, 2, 2, 2), False),
    "resnet34": lambda: resnet((3, 4, 6, 3), False),
    "resnet50": lambda: resnet((3, 4, 6, 3)),
    "resnet50v1": lambda: resnet((3, 4, 6, 3), first=True),
    "resnet101": lambda: resnet((3, 4, 23, 3)),
    "wideresnet50-2": lambda: resnet((3, 4, 6, 3), base=128),
    "densenet121": densenet121,
    "mobilenetv1": mobilenet_v1,
    "mobilenetv1-0.5": lambda: mobilenet_v1(0.5),
    "mobilenetv1-0.25": lambda: mobilenet_v1(0.25),
    "mobilenetv2": mobilenet_v2,
    "mobilenetv2-0.5": lambda: mobilenet_v2(0.5),
    "mobilenetv2-1.4": lambda: mobilenet_v2(1.4),
    "mobilenetv3large": lambda: mobilenet_v3(V3_LARGE, 1280),
    "mobilenetv3small": lambda: mobilenet_v3(V3_SMALL, 1024),
    "mobilenetv3largeminimalistic": lambda: mobilenet_v3(V3_LARGE, 1280, True),
    "efficientnetb0": lambda: efficientnet(EFFICIENT, 1.0, 1.0, nn.SiLU, True, False),
    "efficientnetlite0": lambda: lite(1.0, 1.0),
    "efficientnetlite1": lambda: lite(1.0, 1.1),
    "efficientnetlite2": lambda: lite(1.1, 1.2),
    "efficientnetlite3": lambda: lite(1.2, 1.4),
    "efficientnetlite4": lambda: lite(1.4, 1.8),
    "mnasnet": lambda: efficientnet(MNAS, 1.0, 1.0, nn.ReLU, False, True),
    "shufflenetv2": shufflenet_v2,
    "squeezenet1.0": lambda: squeezenet("1.0"),
    "squeezenet1.1": lambda: squeezenet("1.1"),
    "vgg16": vgg16,
    "alexnet": alexnet,
    "googlenet": lambda: googlenet(5),
    "inceptionv1": lambda: googlenet(3),
    "inceptionv3": inception_v3,
    "mobilenetssd": lambda: ssd_mobilenet_v1(21, True),
    "ssdmobilenetv1": ssd_mobilenet_v1,
    "ssdmobilenetv2": lambda: ssd_mobilenet_v2(False),
    "ssdlitemobilenetv2": lambda: ssd_mobilenet_v2(True),
    "ssdresnet34": ssd_resnet34,
    "retinanetresnext50": lambda: RetinaNet(32, 128, 264),
    "retinanetresnet50": lambda: RetinaNet(1, 64, 91),
    "nanodetm": NanoDet,
    "efficientdetd0": lambda: EfficientDet(1.0, 1.0, 64, 3, 3, False),
    "efficientdetlite0": lambda: EfficientDet(1.0, 1.0, 64, 3, 3, True),
    "efficientdetlite2": lambda: EfficientDet(1.1, 1.2, 112, 5, 3, True),
    "yolov3tiny": yolo_v3_tiny,
    "yolov4tiny": yolo_v4_tiny,
    "yolov5n": lambda: yolo_v5(0.33, 0.25),
    "yolov5s": lambda: yolo_v5(0.33, 0.5),
    "yolov7": yolo_v7,
    "yolov7tiny": yolo_v7_tiny,
    "yolov8n": lambda: yolo_v8(0.33, 0.25, 1024),
    "yolov8s": lambda: yolo_v8(0.33, 0.5, 1024),
    "yolov8m": lambda: yolo_v8(0.67, 0.75, 768),
    "yoloxnano": lambda: yolo_x(0.33, 0.25, True),
    "yoloxtiny": lambda: yolo_x(0.33, 0.375),
    "yoloxs": lambda: yolo_x(0.33, 0.5),
    "yoloxm": lambda: yolo_x(0.67, 0.75),
    **{f"yolov9{size}": partial(yolo_v9, size) for size in "tsm"},
    **{f"yolov10{size}": partial(yolo_v10, size) for size in "nsm"},
    **{f"yolo11{size}": partial(yolo_11, size) for size in "nsmlx"},
    **{f"yolo11{size}pose": partial(yolo_11, size, "pose") for size in "nsmlx"},
    **{f"yolo11{size}seg": partial(yolo_11, size, "segment") for size in "nsmlx"},
    **{f"yolo11{size}cls": partial(yolo_11, size, "classify") for size in "nsmlx"},
    **{f"yolo26{size}": partial(yolo_11, size, later=True) for size in "nsmlx"},
    "convnexttiny": lambda: convnext((3, 3, 9, 3), (96, 192, 384, 768)),
    "convnextbase": lambda: convnext((3, 3, 27, 3), (128, 256, 512, 1024)),
    "swintiny": swin_tiny,
    "vittiny16-224": lambda: vit(192, 12, 3, 16, 224),
    "vitsmall16-224": lambda: vit(384, 12, 6, 16, 224),
    "vitbase16-224": lambda: vit(768, 12, 12, 16, 224),
    "vitbase16-384": lambda: vit(768, 12, 12, 16, 384),
    "vitbase32-224": lambda: vit(768, 12, 12, 32, 224),
    "vitbase32-384": lambda: vit(768, 12, 12, 32, 384),
    "vitlarge16-224": lambda: vit(1024, 24, 16, 16, 224),
    "mixerb16": mixer,
}

# Other spellings, in the form that ``normalised`` gives them.
ALIASES = {
    "resnet50v1.5": "resnet50",
    "mobilenetv11.0": "mobilenetv1",
    "mobilenetv10.5": "mobilenetv1-0.5",
    "mobilenetv10.25": "mobilenetv1-0.25",
    "mobilenetv21.0": "mobilenetv2",
    "mobilenetv2100": "mobilenetv2",
    "mobilenetv20.5": "mobilenetv2-0.5",
    "mobilenetv21.4": "mobilenetv2-1.4",
    "mobilenetv3largex10": "mobilenetv3large",
    "mobilenetv3large100": "mobilenetv3large",
    "mobilenetv3smallx10": "mobilenetv3small",
    "mnasnet1.0": "mnasnet",
    "shufflenetv21.0x": "shufflenetv2",
    "squeezenet": "squeezenet1.0",
    "squeezenetv1.0": "squeezenet1.0",
    "squeezenetv1.1": "squeezenet1.1",
    "wideresnet502": "wideresnet50-2",
    "swintinypatch4window7224": "swintiny",
    "deittiny": "vittiny16-224",
    "vittinypatch16224": "vittiny16-224",
    "vitsmallpatch16224": "vitsmall16-224",
    "vitbasepatch16224": "vitbase16-224",
    "vitbasepatch16384": "vitbase16-384",
    "vitbasepatch32224": "vitbase32-224",
    "vitbase/32384": "vitbase32-384",
    "vitlargepatch16224": "vitlarge16-224",
    "mixerb16224": "mixerb16",
}

# Millions of parameters and GMAC at the usual input, as known from the papers and from the libraries that ship the
# weights; only those of EfficientNet-Lite, of YOLO26's classifiers and of models.csv were looked up. Where sources
# state floating-point operations, half of them. EfficientNet-Lite's count normalisation too.
# The pages state YOLO11's classifiers with ten classes; these are the same graphs with 1000, under the later name
# YOLO26, less the linear layer that their count takes 49 times instead of once. NaN: no source states the GMAC, and
# the same code rebuilds a sibling that has both (EfficientDet-D0).
PUBLISHED: dict[str, tuple[float, float]] = {
    "ResNet-18": (11.69, 1.81), "ResNet-34": (21.80, 3.66), "ResNet-50 v1.5": (25.56, 4.09),
    "ResNet-50 v1": (25.56, 3.86), "resnet101": (44.55, 7.80), "Wide ResNet-50-2": (68.88, 11.40),
    "densenet121": (7.98, 2.83), "MobileNetV1": (4.23, 0.569), "MobileNetV1 0.5": (1.33, 0.149),
    "MobileNetV1 0.25": (0.47, 0.041), "MobileNetV2": (3.50, 0.300), "MobileNetV2 0.5": (1.95, 0.097),
    "MobileNetV2 1.4": (6.11, 0.582), "MobileNetV3-Large": (5.48, 0.219), "MobileNetV3-Small": (2.54, 0.0565),
    "MobileNetV3-Large minimalistic": (3.9, 0.209),
    "EfficientNet-B0": (5.29, 0.39), "EfficientNet-Lite0": (4.65, 0.40), "EfficientNet-Lite1": (5.42, 0.631),
    "EfficientNet-Lite2": (6.09, 0.899), "EfficientNet-Lite3": (8.20, 1.44), "EfficientNet-Lite4": (13.0, 2.64),
    "MnasNet 1.0": (4.38, 0.314), "ShuffleNetV2 1.0x": (2.28, 0.146), "SqueezeNet 1.0": (1.25, 0.82),
    "SqueezeNet v1.1": (1.24, 0.35), "VGG-16": (138.36, 15.47), "AlexNet": (60.97, 0.724),
    "GoogLeNet": (6.999, 1.58), "Inception v1": (6.62, 1.50), "Inception v3": (23.83, 5.71),
    "MobileNet-SSD": (5.783, 1.158), "SSD-MobileNetV1": (6.807, 1.247), "SSD MobileNetV2": (16.818, 1.888),
    "SSDLite Mobilenet v2": (4.475, 0.763), "SSD-ResNet34": (20.058, 216.7), "NanoDet-m": (0.95, 0.36),
    "RetinaNet ResNet50": (34.01, 151.54),
    "EfficientDet-D0": (3.88, 2.5), "EfficientDet-lite0": (3.24, math.nan), "EfficientDet-lite2": (5.25, math.nan),
    "YOLOv3-tiny": (8.85, 2.78), "YOLOv4-tiny": (6.06, 3.45),
    "YOLOv5n": (1.9, 2.25), "YOLOv5s": (7.2, 8.25), "YOLOv7": (36.9, 52.35), "YOLOv7-tiny": (6.2, 6.9),
    "YOLOv8n": (3.2, 4.35), "YOLOv8s": (11.2, 14.3), "YOLOv8m": (25.9, 39.45), "YOLOv9t": (2.0, 3.85),
    "YOLOv9s": (7.1, 13.2), "YOLOv9m": (20.0, 38.15), "YOLOv10n": (2.3, 3.35), "YOLOv10s": (7.2, 10.8),
    "YOLOv10m": (15.4, 29.55), "YOLOX-Nano": (0.91, 0.54), "YOLOX-Tiny": (5.06, 3.225), "YOLOX-S": (9.0, 13.4),
    "YOLOX-M": (25.3, 36.9), "YOLO11n": (2.6, 3.25), "YOLO11s": (9.4, 10.75), "YOLO11m": (20.1, 34.0),
    "YOLO11l": (25.3, 43.45), "YOLO11x": (56.9, 97.45), "YOLO26n": (2.4, 2.7), "YOLO26s": (9.5, 10.35),
    "YOLO26m": (20.4, 34.1), "YOLO26l": (24.8, 43.2), "YOLO26x": (55.7, 96.95), "YOLO11n-pose": (2.9, 3.8),
    "YOLO11s-pose": (9.9, 11.6), "YOLO11m-pose": (20.9, 35.85), "YOLO11l-pose": (26.2, 45.35),
    "YOLO11x-pose": (58.8, 101.65), "YOLO11n-seg": (2.9, 4.85), "YOLO11s-seg": (10.1, 16.5),
    "YOLO11m-seg": (22.4, 56.6), "YOLO11l-seg": (27.6, 66.1), "YOLO11x-seg": (62.1, 148.2),
    "YOLO11n-cls": (2.8, 0.189), "YOLO11s-cls": (6.7, 0.739), "YOLO11m-cls": (11.6, 2.389),
    "YOLO11l-cls": (14.1, 3.039), "YOLO11x-cls": (29.6, 6.759),
    "convnext_tiny": (28.6, 4.5), "ConvNeXt-Base": (88.6, 15.4),
    "Swin-Tiny": (28.3, 4.5), "vit_tiny_patch16_224": (5.72, 1.26), "vit_small_patch16_224": (22.05, 4.61),
    "vit_base_patch16_224": (86.57, 17.58), "vit_base_patch16_384": (86.86, 55.54),
    "vit_base_patch32_224": (88.22, 4.41), "ViT-Base/32-384": (88.30, 13.06),
    "vit_large_patch16_224": (304.33, 61.60), "mixer_b16_224": (59.88, 12.62),
}  # fmt: skip

# Height and width that the published GMAC hold for, where they are not 224.
SIZES: dict[str, tuple[int, int]] = {
    "EfficientNet-Lite1": (240, 240), "EfficientNet-Lite2": (260, 260), "EfficientNet-Lite3": (280, 280),
    "EfficientNet-Lite4": (300, 300), "AlexNet": (227, 227), "Inception v3": (299, 299),
    "MobileNet-SSD": (300, 300), "SSD-MobileNetV1": (300, 300), "SSD MobileNetV2": (300, 300),
    "SSDLite Mobilenet v2": (300, 300), "SSD-ResNet34": (1200, 1200), "NanoDet-m": (320, 320),
    "RetinaNet ResNet50": (800, 800), "EfficientDet-D0": (512, 512), "EfficientDet-lite0": (320, 320),
    "EfficientDet-lite2": (448, 448), "YOLOv3-tiny": (416, 416), "YOLOv4-tiny": (416, 416),
    "YOLOX-Nano": (416, 416), "YOLOX-Tiny": (416, 416), "vit_base_patch16_384": (384, 384),
    "ViT-Base/32-384": (384, 384),
    **{
        name: (640, 640) for name in PUBLISHED
        if re.match(r"YOLO(v\d+[nstm]|v7|X-[SM]|\d)", name) and not name.endswith("-cls")
    },
}  # fmt: skip


def normalised(model: str) -> str:
    """A name without case, spaces, hyphens, underscores and what stands in parentheses."""
    return re.sub(r"\(.*?\)|[\s_-]", "", model.lower())


NAMES = {normalised(name): name for name in RECIPES} | ALIASES


def build(model: str) -> nn.Module | None:
    """Return the network that the column ``model`` names, on the meta device, in eval mode; None: it is not rebuilt."""
    name = NAMES.get(normalised(model))
    if name is None:
        return None
    with torch.device("meta"):
        return RECIPES[name]().eval()
