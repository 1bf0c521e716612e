"""Unit solids of which the turntable's objects consist, their intersections with rays, and the patterns on them.

Intersections are in closed form, except the torus's, which is found by ray marching. Points are [3, n] and directions
[3], float64, in the solid's own coordinates. `shape` is a frustum's top radius over its bottom radius (1: a cylinder,
0: a cone) or a torus's tube radius over its ring radius; other solids ignore it.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

FAR = 1e9  # a ray that hits nothing


def _hit_sphere(points: Array, direction: Array, shape: float) -> Array:
    x, y, z = points
    a = direction @ direction
    b = direction @ points
    under = b * b - a * (x * x + y * y + z * z - 1)
    return np.where(under > 0, (-b - np.sqrt(np.maximum(under, 0))) / a, FAR)


def _slabs(points: Array, direction: Array, half: Array) -> tuple[Array, Array]:
    """Distances at which rays enter and leave the box of half sizes [3]; a ray misses it if it enters after leaving."""
    safe = np.where(np.abs(direction) < 1e-9, 1e-9, direction)
    near, far = np.full(points.shape[1], -FAR), np.full(points.shape[1], FAR)
    for start, speed, size in zip(points, safe, half, strict=True):
        middle, width = start / -speed, abs(size / speed)
        near, far = np.maximum(near, middle - width), np.minimum(far, middle + width)
    return near, far


def _hit_box(points: Array, direction: Array, shape: float) -> Array:
    near, far = _slabs(points, direction, np.ones(3))
    return np.where(near < far, near, FAR)


def _hit_frustum(points: Array, direction: Array, shape: float) -> Array:
    # Side: x^2 + y^2 = (m - k z)^2 for |z| <= 1, of radius 1 at z = -1 and `shape` at z = 1.
    m, k = (1 + shape) / 2, (1 - shape) / 2
    (x, y, z), (dx, dy, dz) = points, direction
    radius = m - k * z
    a = dx * dx + dy * dy - (k * dz) ** 2
    a = a if abs(a) > 1e-9 else 1e-9
    b = x * dx + y * dy + radius * k * dz
    under = b * b - a * (x * x + y * y - radius * radius)
    root = np.sqrt(np.maximum(under, 0))
    best = np.full(z.shape, FAR)
    for distance in ((-b - root) / a, (-b + root) / a):
        height = z + distance * dz
        best = np.where((under > 0) & (np.abs(height) <= 1), np.minimum(best, distance), best)
    if abs(dz) > 1e-9:
        end = -math.copysign(1, dz)  # the cap that faces the camera
        distance = (end - z) / dz
        inside = (x + distance * dx) ** 2 + (y + distance * dy) ** 2 <= (m - k * end) ** 2
        best = np.where(inside, np.minimum(best, distance), best)
    return best


def _hit_torus(points: Array, direction: Array, tube: float) -> Array:
    near, far = _slabs(points, direction, np.array([1 + tube, 1 + tube, tube]))
    found = np.full(near.shape, FAR)
    alive = np.flatnonzero(near < far)
    distance, far = near.take(alive), far.take(alive)
    x, y, z = (axis.take(alive) for axis in points)
    dx, dy, dz = direction
    speed = math.sqrt(direction @ direction)
    for _ in range(32):  # each step is the distance to the surface, so that none passes through it
        px, py, pz = x + distance * dx, y + distance * dy, z + distance * dz
        ring = np.sqrt(px * px + py * py) - 1
        gap = np.sqrt(ring * ring + pz * pz) - tube
        distance = distance + gap / speed
        near_enough = gap < 3e-3
        hit = np.flatnonzero(near_enough)
        found[alive.take(hit)] = distance.take(hit)
        on = np.flatnonzero(~near_enough & (distance < far))
        alive = alive.take(on)
        distance, far, x, y, z = (values.take(on) for values in (distance, far, x, y, z))
    return found


def _normal_sphere(points: Array, shape: float) -> Array:
    return points


def _normal_box(points: Array, shape: float) -> Array:
    x, y, z = np.abs(points)
    largest = np.maximum(np.maximum(x, y), z)
    return np.stack([np.where(np.abs(axis) == largest, axis, 0.0) for axis in points])


def _normal_frustum(points: Array, shape: float) -> Array:
    x, y, z = points
    m, k = (1 + shape) / 2, (1 - shape) / 2
    cap = np.abs(z) > 1 - 1e-6
    return np.where(cap, np.stack([0 * x, 0 * y, z]), np.stack([x, y, k * (m - k * z)]))


def _normal_torus(points: Array, shape: float) -> Array:
    x, y, z = points
    inward = 1 - 1 / np.maximum(np.sqrt(x * x + y * y), 1e-9)
    return np.stack([x * inward, y * inward, z])


# Two functions of each solid: (points, direction, shape) -> distance along the ray [n], FAR where it misses;
# (hit points, shape) -> outward normals [3, n], of any length.
SOLIDS: dict[str, tuple[Callable[[Array, Array, float], Array], Callable[[Array, float], Array]]] = {
    "sphere": (_hit_sphere, _normal_sphere),
    "box": (_hit_box, _normal_box),
    "frustum": (_hit_frustum, _normal_frustum),
    "torus": (_hit_torus, _normal_torus),
}

# The extent of a unit solid along w [3]: the largest w @ q over its points q.
REACH: dict[str, Callable[[Array, float], float]] = {
    "sphere": lambda w, _: math.hypot(*w),
    "box": lambda w, _: float(np.abs(w).sum()),
    "frustum": lambda w, top: max(math.hypot(w[0], w[1]) - w[2], top * math.hypot(w[0], w[1]) + w[2]),
    "torus": lambda w, tube: math.hypot(w[0], w[1]) + tube * math.hypot(*w),
}


def _sharp(value: Array, steepness: float) -> Array:
    return np.clip(value * steepness + 0.5, 0, 1)


# Functions of each pattern: wave arguments [4, n] at the hit points -> weight of the second colour [n] in 0..1.
PATTERNS: dict[str, Callable[[Array], Array]] = {
    "stripes": lambda w: _sharp(np.sin(w[0]), 5),
    "checks": lambda w: _sharp(np.sin(w[0]) * np.sin(w[1]) * np.sin(w[2]), 12),
    "spots": lambda w: _sharp(np.cos(w[0]) + np.cos(w[1]) + np.cos(w[2]) - 1.1, 3),
    "marble": lambda w: 0.5 + 0.5 * np.sin(0.6 * w[0] + 1.8 * np.sin(0.7 * w[1]) + 1.3 * np.sin(0.9 * w[2])),
    "clouds": lambda w: _sharp(np.sin(w[0]) + np.sin(1.3 * w[1]) + np.sin(0.8 * w[2]) + np.sin(1.7 * w[3]), 0.35),
    "gradient": lambda w: 0.5 + 0.5 * np.sin(0.35 * w[0]),
    "bands": lambda w: _sharp(np.sin(w[0]) + 0.5 * np.sin(2 * w[0] + w[3]), 2),
}
