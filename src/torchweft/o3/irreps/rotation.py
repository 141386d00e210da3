"""Rotations as matrices, Euler angles, quaternions, and an axis with an angle.

R(α, β, γ) = Ry(α) Rx(β) Ry(γ),  and  (α, β) is the point R(α, β, ·) e_y of the sphere

Matrices act on columns (x, y, z); quaternions are (w, x, y, z) of length 1; names and conventions
are e3nn's.  Every function is differentiable and takes any leading dimensions.
"""

from __future__ import annotations

import itertools
import math
from typing import TypeAlias

import torch
from torch import Tensor

from torchweft.core.operators.operands import check_tensors
from torchweft.errors import DTypeError, ShapeError

__all__ = [
    "angles_to_axis_angle",
    "angles_to_matrix",
    "angles_to_quaternion",
    "angles_to_xyz",
    "axis_angle_to_angles",
    "axis_angle_to_matrix",
    "axis_angle_to_quaternion",
    "compose_angles",
    "compose_axis_angle",
    "compose_quaternion",
    "identity_angles",
    "identity_quaternion",
    "inverse_angles",
    "inverse_quaternion",
    "matrix_to_angles",
    "matrix_to_axis_angle",
    "matrix_to_quaternion",
    "matrix_x",
    "matrix_y",
    "matrix_z",
    "quaternion_to_angles",
    "quaternion_to_axis_angle",
    "quaternion_to_matrix",
    "rand_angles",
    "rand_axis_angle",
    "rand_matrix",
    "rand_quaternion",
    "xyz_to_angles",
]

Angles: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""α, β, γ."""

Dtype: TypeAlias = torch.dtype | None
Device: TypeAlias = torch.device | str | None


def rand_matrix(
    *shape: int, requires_grad: bool = False, dtype: Dtype = None, device: Device = None
) -> Tensor:
    """Random rotation matrices, uniform over the group of rotations.

    Args:
        *shape: the leading dimensions; none gives one matrix.
        requires_grad: whether the result is a leaf that requires gradients.
        dtype: of the result; None: torch's default dtype.
        device: of the result; None: torch's default device.

    Returns:
        (*shape, 3, 3), orthogonal with determinant 1, from torch's global generator.

    Raises:
        DTypeError: a size is no integer.
        ShapeError: a size is negative.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> R = o3.rand_matrix(10, dtype=torch.float64)
        >>> R.shape, bool((torch.linalg.det(R) - 1).abs().max() < 1e-12)
        (torch.Size([10, 3, 3]), True)
    """
    matrix = angles_to_matrix(*rand_angles(*shape, dtype=dtype, device=device))
    return matrix.requires_grad_(requires_grad)


def rand_angles(
    *shape: int, requires_grad: bool = False, dtype: Dtype = None, device: Device = None
) -> Angles:
    """Euler angles of random rotations, uniform over the group of rotations.

    Args:
        *shape: the shape of each angle.
        requires_grad: whether the results are leaves that require gradients.
        dtype: of the results; None: torch's default dtype.
        device: of the results; None: torch's default device.

    Returns:
        α, β and γ in radians, each (*shape).  α and γ are in [0, 2π), cos β is uniform in [-1, 1].

    Raises:
        DTypeError: a size is no integer.
        ShapeError: a size is negative.

    Example:
        >>> from torchweft import o3
        >>> alpha, beta, gamma = o3.rand_angles(5)
        >>> o3.angles_to_matrix(alpha, beta, gamma).shape
        torch.Size([5, 3, 3])
    """
    _check_sizes(shape)
    alpha, gamma = 2 * math.pi * torch.rand(2, *shape, dtype=dtype, device=device)
    beta = torch.rand(shape, dtype=dtype, device=device).mul(2).sub(1).acos()
    return _leaf_angles(alpha, beta, gamma, requires_grad)


def rand_quaternion(
    *shape: int, requires_grad: bool = False, dtype: Dtype = None, device: Device = None
) -> Tensor:
    """Unit quaternions of random rotations, uniform over the group of rotations.

    Args:
        *shape: the leading dimensions.
        requires_grad: whether the result requires gradients.
        dtype: of the result; None: torch's default dtype.
        device: of the result; None: torch's default device.

    Returns:
        (*shape, 4), quaternions (w, x, y, z).

    Raises:
        DTypeError: a size is no integer.
        ShapeError: a size is negative.

    Example:
        >>> from torchweft import o3
        >>> o3.rand_quaternion(5).shape
        torch.Size([5, 4])
    """
    angles = rand_angles(*shape, dtype=dtype, device=device)
    return angles_to_quaternion(*angles).requires_grad_(requires_grad)


def rand_axis_angle(
    *shape: int, requires_grad: bool = False, dtype: Dtype = None, device: Device = None
) -> tuple[Tensor, Tensor]:
    """Axes and angles of random rotations, uniform over the group of rotations.

    Args:
        *shape: the leading dimensions.
        requires_grad: whether the results require gradients.
        dtype: of the results; None: torch's default dtype.
        device: of the results; None: torch's default device.

    Returns:
        Axes (*shape, 3) of length 1, and angles (*shape) in [0, π], in radians.

    Raises:
        DTypeError: a size is no integer.
        ShapeError: a size is negative.

    Example:
        >>> from torchweft import o3
        >>> axis, angle = o3.rand_axis_angle(5)
        >>> axis.shape, angle.shape
        (torch.Size([5, 3]), torch.Size([5]))
    """
    axis, angle = angles_to_axis_angle(*rand_angles(*shape, dtype=dtype, device=device))
    return axis.requires_grad_(requires_grad), angle.requires_grad_(requires_grad)


def identity_angles(
    *shape: int, requires_grad: bool = False, dtype: Dtype = None, device: Device = None
) -> Angles:
    """Euler angles of the identity, all 0.

    Args:
        *shape: the shape of each angle.
        requires_grad: whether the results are leaves that require gradients.
        dtype: of the results; None: torch's default dtype.
        device: of the results; None: torch's default device.

    Returns:
        α, β and γ, three tensors of zeros (*shape).

    Raises:
        DTypeError: a size is no integer.
        ShapeError: a size is negative.

    Example:
        >>> from torchweft import o3
        >>> o3.identity_angles(2)
        (tensor([0., 0.]), tensor([0., 0.]), tensor([0., 0.]))
    """
    _check_sizes(shape)
    alpha, beta, gamma = torch.zeros(3, *shape, dtype=dtype, device=device)
    return _leaf_angles(alpha, beta, gamma, requires_grad)


def identity_quaternion(
    *shape: int, requires_grad: bool = False, dtype: Dtype = None, device: Device = None
) -> Tensor:
    """The quaternion (1, 0, 0, 0) of the identity.

    Args:
        *shape: the leading dimensions.
        requires_grad: whether the result requires gradients.
        dtype: of the result; None: torch's default dtype.
        device: of the result; None: torch's default device.

    Returns:
        (*shape, 4), quaternions (w, x, y, z).

    Raises:
        DTypeError: a size is no integer.
        ShapeError: a size is negative.

    Example:
        >>> from torchweft import o3
        >>> o3.identity_quaternion()
        tensor([1., 0., 0., 0.])
    """
    _check_sizes(shape)
    one = torch.ones(*shape, 1, dtype=dtype, device=device)
    zeros = torch.zeros(*shape, 3, dtype=dtype, device=device)
    return torch.cat([one, zeros], -1).requires_grad_(requires_grad)


def matrix_x(angle: Tensor) -> Tensor:
    """Matrices of rotations about the x axis, which turn y towards z.

    Args:
        angle: (...), in radians.

    Returns:
        (..., 3, 3) in the dtype of the angle; differentiable to any order.

    Example:
        >>> import math, torch
        >>> from torchweft import o3
        >>> R = o3.matrix_x(torch.tensor(math.pi / 2))
        >>> (R @ torch.tensor([0.0, 1.0, 0.0])).round(decimals=4) + 0.0  # y becomes z
        tensor([0., 0., 1.])
    """
    return _axis_matrix(angle, 0)


def matrix_y(angle: Tensor) -> Tensor:
    """Matrices of rotations about the y axis, which turn z towards x.

    Args:
        angle: (...), in radians.

    Returns:
        (..., 3, 3) in the dtype of the angle; differentiable to any order.

    Example:
        >>> import math, torch
        >>> from torchweft import o3
        >>> R = o3.matrix_y(torch.tensor(math.pi / 2))
        >>> (R @ torch.tensor([0.0, 0.0, 1.0])).round(decimals=4) + 0.0  # z becomes x
        tensor([1., 0., 0.])
    """
    return _axis_matrix(angle, 1)


def matrix_z(angle: Tensor) -> Tensor:
    """Matrices of rotations about the z axis, which turn x towards y.

    Args:
        angle: (...), in radians.

    Returns:
        (..., 3, 3) in the dtype of the angle; differentiable to any order.

    Example:
        >>> import math, torch
        >>> from torchweft import o3
        >>> R = o3.matrix_z(torch.tensor(math.pi / 2))
        >>> (R @ torch.tensor([1.0, 0.0, 0.0])).round(decimals=4) + 0.0  # x becomes y
        tensor([0., 1., 0.])
    """
    return _axis_matrix(angle, 2)


def angles_to_matrix(alpha: Tensor, beta: Tensor, gamma: Tensor) -> Tensor:
    """R = Ry(α) Rx(β) Ry(γ): the rotation matrix of Euler angles.

    Args:
        alpha: (...), the rotation about y that is applied last, in radians.
        beta: (...), the rotation about x, in radians.
        gamma: (...), the rotation about y that is applied first, in radians.  The three broadcast.

    Returns:
        (..., 3, 3) in the dtype of the angles; differentiable to any order.

    Raises:
        ShapeError: the angles do not broadcast.
        DTypeError: the angles are not real tensors of one dtype.

    Example:
        >>> import math, torch
        >>> from torchweft import o3
        >>> zero = torch.tensor(0.0)
        >>> R = o3.angles_to_matrix(zero, torch.tensor(math.pi / 2), zero)
        >>> (R @ torch.tensor([0.0, 1.0, 0.0])).round(decimals=4) + 0.0  # y becomes z
        tensor([0., 0., 1.])
    """
    alpha, beta, gamma = broadcast_named(alpha=alpha, beta=beta, gamma=gamma)
    return matrix_y(alpha) @ matrix_x(beta) @ matrix_y(gamma)


def quaternion_to_matrix(q: Tensor) -> Tensor:
    """R = (w² - v·v) I + 2 v vᵀ + 2 w [v]× of q / |q| = (w, v).

    Args:
        q: (..., 4), quaternions (w, x, y, z) of any length but 0.

    Returns:
        (..., 3, 3) in the dtype of q; differentiable to any order.

    Raises:
        ShapeError: q is not (..., 4).
        DTypeError: q is not a floating-point tensor.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> o3.quaternion_to_matrix(torch.tensor([1.0, 0.0, 0.0, 0.0]))
        tensor([[1., 0., 0.],
                [0., 1., 0.],
                [0., 0., 1.]])
    """
    check_last("q", q, 4)
    w, v = unit(q).tensor_split([1], -1)
    scalar = w.square() - v.square().sum(-1, keepdim=True)
    return _rodrigues(scalar, 2 * w, 2 * torch.ones_like(w), v)


def axis_angle_to_matrix(axis: Tensor, angle: Tensor) -> Tensor:
    """R = cos θ I + (1 - cos θ) a aᵀ + sin θ [a]× of a = axis / |axis|.

    Args:
        axis: (..., 3), vectors of any length but 0.
        angle: (...), θ in radians.

    Returns:
        (..., 3, 3) in the common dtype; differentiable to any order.

    Raises:
        ShapeError: axis is not (..., 3), or the two do not broadcast.
        DTypeError: the two are not floating-point tensors of one dtype.

    Example:
        >>> import math, torch
        >>> from torchweft import o3
        >>> R = o3.axis_angle_to_matrix(torch.tensor([0.0, 0.0, 1.0]), torch.tensor(math.pi))
        >>> R.diagonal()
        tensor([-1., -1.,  1.])
    """
    check_last("axis", axis, 3)
    _check_shapes({"axis[..., 0]": axis[..., 0], "angle": angle})
    c, s = angle.cos()[..., None], angle.sin()[..., None]
    return _rodrigues(c, s, 1 - c, unit(axis))


def xyz_to_angles(xyz: Tensor) -> tuple[Tensor, Tensor]:
    """α = atan2(x, z) and β = atan2(√(x² + z²), y): the angles of directions.

    Args:
        xyz: (..., 3), vectors of any length.

    Returns:
        α in (-π, π] and β in [0, π], each (...), in radians.  R(α, β, ·) turns the y axis into the
        direction.

    Raises:
        ShapeError: xyz is not (..., 3).
        DTypeError: xyz is not a floating-point tensor.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> o3.xyz_to_angles(torch.tensor([0.0, 0.0, 2.0]))
        (tensor(0.), tensor(1.5708))
    """
    check_last("xyz", xyz, 3)
    x, y, z = xyz.unbind(-1)
    return torch.atan2(x, z), torch.atan2(torch.linalg.vector_norm(xyz[..., ::2], dim=-1), y)


def angles_to_xyz(alpha: Tensor, beta: Tensor) -> Tensor:
    """(sin β sin α, cos β, sin β cos α): the unit vector R(α, β, ·) e_y.

    Args:
        alpha: (...), in radians.
        beta: (...), in radians; the two broadcast.

    Returns:
        (..., 3) in the dtype of the angles; differentiable to any order.

    Raises:
        ShapeError: the angles do not broadcast.
        DTypeError: the angles are not real tensors of one dtype.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> o3.angles_to_xyz(torch.tensor(0.0), torch.tensor(0.0))
        tensor([0., 1., 0.])
    """
    alpha, beta = broadcast_named(alpha=alpha, beta=beta)
    return torch.stack([beta.sin() * alpha.sin(), beta.cos(), beta.sin() * alpha.cos()], -1)


def matrix_to_angles(R: Tensor) -> Angles:  # noqa: N803 - e3nn's name
    """Euler angles of rotation matrices: α and β of R e_y, then γ.

    Args:
        R: (..., 3, 3), rotations; they are not checked for being orthogonal.

    Returns:
        α, β, γ, each (...), in radians, with 0 ≤ β ≤ π.

    Raises:
        ShapeError: R is not (..., 3, 3).
        DTypeError: R is not a floating-point tensor.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> alpha, beta, gamma = o3.matrix_to_angles(o3.matrix_x(torch.tensor(0.5)))
        >>> round(float(beta), 4)
        0.5
    """
    check_matrix("R", R)
    alpha, beta = xyz_to_angles(R[..., :, 1])
    # the first row of (Ry(α) Rx(β))ᵀ R, which is that of Ry(γ)
    row = alpha.cos()[..., None] * R[..., 0, :] - alpha.sin()[..., None] * R[..., 2, :]
    return alpha, beta, torch.atan2(row[..., 2], row[..., 0])


def quaternion_to_angles(q: Tensor) -> Angles:
    """Euler angles of quaternions.

    Args:
        q: (..., 4), quaternions (w, x, y, z) of any length but 0.

    Returns:
        α, β, γ, each (...), in radians, with 0 ≤ β ≤ π.

    Raises:
        ShapeError: q is not (..., 4).
        DTypeError: q is not a floating-point tensor.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> o3.quaternion_to_angles(torch.tensor([1.0, 0.0, 0.0, 0.0]))
        (tensor(0.), tensor(0.), tensor(0.))
    """
    return matrix_to_angles(quaternion_to_matrix(q))


def axis_angle_to_angles(axis: Tensor, angle: Tensor) -> Angles:
    """Euler angles of a rotation about an axis.

    Args:
        axis: (..., 3), vectors of any length but 0.
        angle: (...), in radians.

    Returns:
        α, β, γ, each (...), in radians, with 0 ≤ β ≤ π.

    Raises:
        ShapeError: axis is not (..., 3), or the two do not broadcast.
        DTypeError: the two are not floating-point tensors of one dtype.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> x = torch.tensor([1.0, 0.0, 0.0])
        >>> alpha, beta, gamma = o3.axis_angle_to_angles(x, torch.tensor(0.5))
        >>> round(float(beta), 4)
        0.5
    """
    return matrix_to_angles(axis_angle_to_matrix(axis, angle))


def axis_angle_to_quaternion(xyz: Tensor, angle: Tensor) -> Tensor:
    """q = (cos θ/2, a sin θ/2) of a = xyz / |xyz|.

    Args:
        xyz: (..., 3), the axis, vectors of any length but 0.
        angle: (...), θ in radians.

    Returns:
        (..., 4), quaternions (w, x, y, z) of length 1.

    Raises:
        ShapeError: xyz is not (..., 3), or the two do not broadcast.
        DTypeError: the two are not floating-point tensors of one dtype.

    Example:
        >>> import math, torch
        >>> from torchweft import o3
        >>> o3.axis_angle_to_quaternion(torch.tensor([0.0, 2.0, 0.0]), torch.tensor(math.pi / 2))
        tensor([0.7071, 0.0000, 0.7071, 0.0000])
    """
    check_last("xyz", xyz, 3)
    _check_shapes({"xyz[..., 0]": xyz[..., 0], "angle": angle})
    half = angle[..., None] / 2
    w, v = half.cos(), unit(xyz) * half.sin()
    return torch.cat([w.expand(*v.shape[:-1], 1), v], -1)


def angles_to_quaternion(alpha: Tensor, beta: Tensor, gamma: Tensor) -> Tensor:
    """(cos β/2 cos σ, sin β/2 cos δ, cos β/2 sin σ, -sin β/2 sin δ), σ = (α + γ)/2, δ = (α - γ)/2.

    Args:
        alpha: (...), the rotation about y that is applied last, in radians.
        beta: (...), the rotation about x, in radians.
        gamma: (...), the rotation about y that is applied first, in radians.  The three broadcast.

    Returns:
        (..., 4), quaternions (w, x, y, z) of length 1.

    Raises:
        ShapeError: the angles do not broadcast.
        DTypeError: the angles are not real tensors of one dtype.

    Example:
        >>> from torchweft import o3
        >>> o3.angles_to_quaternion(*o3.identity_angles())
        tensor([1., 0., 0., -0.])
    """
    alpha, beta, gamma = broadcast_named(alpha=alpha, beta=beta, gamma=gamma)
    total, difference = (alpha + gamma) / 2, (alpha - gamma) / 2
    c, s = (beta / 2).cos(), (beta / 2).sin()
    parts = c * total.cos(), s * difference.cos(), c * total.sin(), -s * difference.sin()
    return torch.stack(parts, -1)


def matrix_to_quaternion(R: Tensor) -> Tensor:  # noqa: N803 - e3nn's name
    """Quaternions of rotation matrices: the row of 4 q qᵀ with the largest diagonal, normalised.

    Args:
        R: (..., 3, 3), rotations; they are not checked for being orthogonal.

    Returns:
        (..., 4), quaternions (w, x, y, z) of length 1 with w ≥ 0.

    Raises:
        ShapeError: R is not (..., 3, 3).
        DTypeError: R is not a floating-point tensor.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> o3.matrix_to_quaternion(torch.eye(3))
        tensor([1., 0., 0., 0.])
    """
    check_matrix("R", R)
    (xx, xy, xz), (yx, yy, yz), (zx, zy, zz) = (row.unbind(-1) for row in R.unbind(-2))
    wx, wy, wz = zy - yz, xz - zx, yx - xy
    rows = (
        (1 + xx + yy + zz, wx, wy, wz),
        (wx, 1 + xx - yy - zz, xy + yx, xz + zx),
        (wy, xy + yx, 1 - xx + yy - zz, yz + zy),
        (wz, xz + zx, yz + zy, 1 - xx - yy + zz),
    )
    outer = torch.stack([torch.stack(row, -1) for row in rows], -2)
    largest = outer.diagonal(dim1=-2, dim2=-1).argmax(-1)[..., None, None]
    q = unit(torch.take_along_dim(outer, largest, -2).squeeze(-2))
    return torch.where(q[..., :1] < 0, -q, q)


def quaternion_to_axis_angle(q: Tensor) -> tuple[Tensor, Tensor]:
    """a = v / |v| and θ = 2 atan2(|v|, w) of q = (w, v).

    Args:
        q: (..., 4), quaternions (w, x, y, z) of any length but 0.

    Returns:
        Axes (..., 3) of length 1, 0 for the identity, and angles (...) in [0, 2π], in radians.

    Raises:
        ShapeError: q is not (..., 4).
        DTypeError: q is not a floating-point tensor.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> o3.quaternion_to_axis_angle(torch.tensor([0.0, 0.0, 0.0, 1.0]))
        (tensor([0., 0., 1.]), tensor(3.1416))
    """
    check_last("q", q, 4)
    w, v = q[..., 0], q[..., 1:]
    return unit(v), 2 * torch.atan2(torch.linalg.vector_norm(v, dim=-1), w)


def matrix_to_axis_angle(R: Tensor) -> tuple[Tensor, Tensor]:  # noqa: N803 - e3nn's name
    """Axis and angle of rotation matrices.

    Args:
        R: (..., 3, 3), rotations; they are not checked for being orthogonal.

    Returns:
        Axes (..., 3) of length 1, 0 for the identity, and angles (...) in [0, π], in radians.

    Raises:
        ShapeError: R is not (..., 3, 3).
        DTypeError: R is not a floating-point tensor.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> axis, angle = o3.matrix_to_axis_angle(o3.matrix_y(torch.tensor(0.5)))
        >>> axis, round(float(angle), 4)
        (tensor([0., 1., 0.]), 0.5)
    """
    return quaternion_to_axis_angle(matrix_to_quaternion(R))


def angles_to_axis_angle(alpha: Tensor, beta: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """Axis and angle of the rotation with Euler angles α, β, γ.

    Args:
        alpha: (...), the rotation about y that is applied last, in radians.
        beta: (...), the rotation about x, in radians.
        gamma: (...), the rotation about y that is applied first, in radians.  The three broadcast.

    Returns:
        Axes (..., 3) of length 1, 0 for the identity, and angles (...) in [0, π], in radians.

    Raises:
        ShapeError: the angles do not broadcast.
        DTypeError: the angles are not real tensors of one dtype.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> zero = torch.tensor(0.0)
        >>> axis, angle = o3.angles_to_axis_angle(zero, torch.tensor(0.5), zero)
        >>> axis, round(float(angle), 4)
        (tensor([1., 0., 0.]), 0.5)
    """
    return matrix_to_axis_angle(angles_to_matrix(alpha, beta, gamma))


def compose_angles(
    a1: Tensor, b1: Tensor, c1: Tensor, a2: Tensor, b2: Tensor, c2: Tensor
) -> Angles:
    """Euler angles of R(a1, b1, c1) R(a2, b2, c2): the second rotation, then the first.

    Args:
        a1: (...), α of the first rotation, in radians, as all angles.
        b1: (...), β of the first rotation.
        c1: (...), γ of the first rotation.
        a2: (...), α of the second rotation.
        b2: (...), β of the second rotation.
        c2: (...), γ of the second rotation.  The six broadcast.

    Returns:
        α, β, γ, each (...), with 0 ≤ β ≤ π.

    Raises:
        ShapeError: the angles do not broadcast.
        DTypeError: the angles are not real tensors of one dtype.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> zero, angle = torch.tensor(0.0), torch.tensor(0.5)
        >>> alpha, beta, gamma = o3.compose_angles(zero, angle, zero, zero, angle, zero)
        >>> round(float(beta), 4)
        1.0
    """
    a1, b1, c1, a2, b2, c2 = broadcast_named(a1=a1, b1=b1, c1=c1, a2=a2, b2=b2, c2=c2)
    return matrix_to_angles(angles_to_matrix(a1, b1, c1) @ angles_to_matrix(a2, b2, c2))


def compose_quaternion(q1: Tensor, q2: Tensor) -> Tensor:
    """q1 q2 = (w1 w2 - v1·v2, w1 v2 + w2 v1 + v1 × v2): the rotation q2, then q1.

    Args:
        q1: (..., 4), quaternions (w, x, y, z).
        q2: (..., 4); the two broadcast.

    Returns:
        (..., 4), in the dtype of both.

    Raises:
        ShapeError: q1 or q2 is not (..., 4), or the two do not broadcast.
        DTypeError: q1 and q2 are not floating-point tensors of one dtype.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> i, j = torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 1.0, 0.0])
        >>> o3.compose_quaternion(i, j)  # k
        tensor([0., 0., 0., 1.])
    """
    check_last("q1", q1, 4)
    check_last("q2", q2, 4)
    q1, q2 = broadcast_named(q1=q1, q2=q2)
    (w1, v1), (w2, v2) = (q.tensor_split([1], -1) for q in (q1, q2))
    scalar = w1 * w2 - (v1 * v2).sum(-1, keepdim=True)
    return torch.cat([scalar, w1 * v2 + w2 * v1 + torch.linalg.cross(v1, v2)], -1)


def compose_axis_angle(
    axis1: Tensor, angle1: Tensor, axis2: Tensor, angle2: Tensor
) -> tuple[Tensor, Tensor]:
    """Axis and angle of the second rotation followed by the first.

    Args:
        axis1: (..., 3), the axis of the first rotation, of any length but 0.
        angle1: (...), its angle in radians.
        axis2: (..., 3), the axis of the second rotation.
        angle2: (...), its angle in radians.

    Returns:
        Axes (..., 3) of length 1, 0 for the identity, and angles (...) in [0, 2π], in radians.

    Raises:
        ShapeError: an axis is not (..., 3), or the four do not broadcast.
        DTypeError: the four are not floating-point tensors of one dtype.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> y, angle = torch.tensor([0.0, 1.0, 0.0]), torch.tensor(0.5)
        >>> axis, total = o3.compose_axis_angle(y, angle, y, angle)
        >>> round(float(total), 4)
        1.0
    """
    q1, q2 = axis_angle_to_quaternion(axis1, angle1), axis_angle_to_quaternion(axis2, angle2)
    return quaternion_to_axis_angle(compose_quaternion(q1, q2))


def inverse_angles(a: Tensor, b: Tensor, c: Tensor) -> Angles:
    """(-γ, -β, -α): Euler angles of the inverse rotation.

    Args:
        a: (...), α in radians.
        b: (...), β in radians.
        c: (...), γ in radians.

    Returns:
        Three tensors (...).

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> o3.inverse_angles(torch.tensor(1.0), torch.tensor(2.0), torch.tensor(3.0))
        (tensor(-3.), tensor(-2.), tensor(-1.))
    """
    return -c, -b, -a


def inverse_quaternion(q: Tensor) -> Tensor:
    """(w, -v): the inverse of a unit quaternion (w, v).

    Args:
        q: (..., 4), quaternions (w, x, y, z) of length 1.

    Returns:
        (..., 4), in the dtype of q.

    Raises:
        ShapeError: q is not (..., 4).
        DTypeError: q is not a floating-point tensor.

    Example:
        >>> import torch
        >>> from torchweft import o3
        >>> o3.inverse_quaternion(torch.tensor([0.0, 1.0, 0.0, 0.0]))
        tensor([ 0., -1., -0., -0.])
    """
    check_last("q", q, 4)
    return torch.cat([q[..., :1], -q[..., 1:]], -1)


def unit(v: Tensor, dim: int = -1) -> Tensor:
    """v / |v| along a dimension; 0 with gradient 0 where v is 0.

    Vectors shorter than the root of the smallest normal number (1e-19 in float32) count as 0.
    """
    square = v.square().sum(dim, keepdim=True)
    return v / torch.threshold(square, torch.finfo(v.dtype).tiny, math.inf).sqrt()


def _axis_matrix(angle: Tensor, axis: int) -> Tensor:
    """Rotations about a coordinate axis that turn the next axis towards the one after it."""
    c, s = angle.cos(), angle.sin()
    one, zero = torch.ones_like(angle), torch.zeros_like(angle)
    entries = torch.stack([one, zero, zero, zero, c, -s, zero, s, c], -1)
    about_x = entries.reshape(*angle.shape, 3, 3)
    return torch.roll(about_x, (axis, axis), (-2, -1))


def _rodrigues(diagonal: Tensor, skew: Tensor, outer: Tensor, v: Tensor) -> Tensor:
    """diagonal · I + skew · [v]× + outer · v vᵀ, (..., 3, 3)."""
    eye = torch.eye(3, dtype=v.dtype, device=v.device)
    squared: Tensor = v[..., :, None] * v[..., None, :]
    columns = v[..., :, None].expand_as(squared)
    crossed = torch.linalg.cross(columns, eye.expand_as(squared), dim=-2)
    diagonal, skew, outer = (a[..., None] for a in (diagonal, skew, outer))
    matrix: Tensor = diagonal * eye + skew * crossed + outer * squared
    return matrix


def _leaf_angles(alpha: Tensor, beta: Tensor, gamma: Tensor, requires_grad: bool) -> Angles:
    a, b, c = (t.detach().requires_grad_(requires_grad) for t in (alpha, beta, gamma))
    return a, b, c


def broadcast_named(**tensors: Tensor) -> tuple[Tensor, ...]:
    """Expand the tensors to one shape; the error message contains their names."""
    _check_shapes(tensors)
    return tuple(torch.broadcast_tensors(*tensors.values()))  # type: ignore[no-untyped-call]


def _check_shapes(tensors: dict[str, Tensor]) -> None:
    """Raise ShapeError unless the tensors broadcast together."""
    if torch.compiler.is_compiling():
        return  # sizes may be symbols
    check_tensors(**tensors)
    _check_real(tensors)
    aligned = itertools.zip_longest(*(reversed(t.shape) for t in tensors.values()), fillvalue=1)
    if any(len({*sizes} - {1}) > 1 for sizes in aligned):
        given = ", ".join(f"{name} {tuple(t.shape)}" for name, t in tensors.items())
        raise ShapeError(
            f"the shapes {given} do not broadcast: from the last on, sizes must be equal or 1. "
            "Reshape them, such as with unsqueeze."
        )


def _check_floating(**tensors: Tensor) -> None:
    """Raise DTypeError unless all are floating-point tensors."""
    check_tensors(**tensors)
    for name, a in tensors.items():
        if not a.is_floating_point():
            raise DTypeError(
                f"{name} is {a.dtype}: it must be floating-point. Pass {name}.float()."
            )


def _check_real(tensors: dict[str, Tensor]) -> None:
    """Raise DTypeError where a tensor is complex, or floating-point ones have several dtypes."""
    given = {name: a.dtype for name, a in tensors.items()}
    floating = {dtype for dtype in given.values() if dtype.is_floating_point}
    if len(floating) > 1 or any(dtype.is_complex for dtype in given.values()):
        found = ", ".join(f"{name} {dtype}" for name, dtype in given.items())
        raise DTypeError(
            f"the dtypes are {found}: they must be one real dtype. Convert them, such as with "
            ".float()."
        )


def _check_sizes(shape: tuple[int, ...]) -> None:
    """Raise DTypeError or ShapeError unless all sizes are integers, 0 or more."""
    if torch.compiler.is_compiling():
        return
    for size in shape:
        if not hasattr(size, "__index__"):
            raise DTypeError(
                f"a size is {size!r}: sizes must be integers. Pass each by itself, such as 2, 3."
            )
        if size < 0:
            raise ShapeError(f"a size is {size}: sizes must be 0 or more. Pass 10, for example.")


def check_last(name: str, a: Tensor, size: int) -> None:
    """Raise DTypeError or ShapeError unless `a` is a tensor (..., size)."""
    _check_floating(**{name: a})
    if a.dim() == 0 or a.shape[-1] != size:
        raise ShapeError(
            f"{name} is {tuple(a.shape)}: it must be (..., {size}). Move the components last."
        )


def check_matrix(name: str, matrix: Tensor) -> None:
    """Raise DTypeError or ShapeError unless `matrix` is a tensor (..., 3, 3)."""
    _check_floating(**{name: matrix})
    if matrix.shape[-2:] != (3, 3):
        raise ShapeError(
            f"{name} is {tuple(matrix.shape)}: it must be (..., 3, 3). "
            "Pass rotations, such as those of rand_matrix(10)."
        )
