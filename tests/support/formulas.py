"""The formulas of all optimizers in NumPy float32, a row at a time, one rounding for each operation.

Written from FBGEMM's sources (`fbgemm_gpu/codegen/genscript/optimizers.py`) and torch.optim's, for kernels to equal bit
for bit. `FORMULAS` has each of `records.optimizers.NAMES`: (w, state by name, g, lr, iteration, fixed) -> (w, state).
"""

import functools

import numpy as np

from torch_ecrec.records.optimizers import optimizer

F32 = np.float32


def squares(values):
    """Sum of squares in 8 lanes and a fixed tree."""
    lanes = [functools.reduce(lambda a, x: F32(a + F32(x * x)), values[lane::8], F32(0)) for lane in range(8)]
    a, b, c, d, e, f, g, h = lanes
    return F32(F32(F32(a + e) + F32(c + g)) + F32(F32(b + f) + F32(d + h)))


def sgd(w, state, g, lr, iteration):
    return w - lr * g, {}


def momentum_sgd(w, state, g, lr, iteration, momentum, weight_decay):
    m = momentum * state["momentum1"] + (g + weight_decay * w)
    return w - lr * m, {"momentum1": m}


def adagrad(w, state, g, lr, iteration, eps):
    s = state["momentum1"] + g * g
    return w - lr * g / (np.sqrt(s) + eps), {"momentum1": s}


def rowwise_adagrad(w, state, g, lr, iteration, eps, weight_decay, weight_decay_mode, max_norm):
    total = squares(g + weight_decay * w) if weight_decay_mode == 1 else squares(g)
    s = state["momentum1"] + total / F32(len(w))
    multiplier = lr / (np.sqrt(s) + eps)
    kept = {0: F32(1), 1: F32(1) - multiplier * weight_decay, 2: F32(1) - lr * weight_decay}[int(weight_decay_mode)]
    new = kept * w - multiplier * g
    norm = np.sqrt(squares(new))
    return (new * (max_norm / norm) if 0 < max_norm < norm else new), {"momentum1": s}


def lars_sgd(w, state, g, lr, iteration, momentum, eta, weight_decay):
    length = np.sqrt(squares(w))
    below = np.sqrt(squares(g)) + weight_decay * length
    rate = lr * eta * length / below if below else F32(0)
    m = momentum * state["momentum1"] + rate * (g + weight_decay * w)
    return w - m, {"momentum1": m}


def _moments(state, g, square, iteration, beta1, beta2):
    """m, v, and both with their bias corrected."""
    b1, b2 = float(beta1), float(beta2)
    m = beta1 * state["momentum1"] + F32(1 - b1) * g
    v = beta2 * state["exp_avg_sq"] + F32(1 - b2) * square
    return m, v, m / F32(1 - b1**iteration), v / F32(1 - b2**iteration)


def adam(w, state, g, lr, iteration, eps, beta1, beta2, weight_decay):
    m, v, m_hat, v_hat = _moments(state, g, g * g, iteration, beta1, beta2)
    return w - lr * (m_hat / (np.sqrt(v_hat) + eps) + weight_decay * w), {"momentum1": m, "exp_avg_sq": v}


def partial_rowwise_adam(w, state, g, lr, iteration, eps, beta1, beta2, weight_decay):
    m, v, m_hat, v_hat = _moments(state, g, squares(g) / F32(len(g)), iteration, beta1, beta2)
    return w - lr * (m_hat / (np.sqrt(v_hat) + eps) + weight_decay * w), {"momentum1": m, "exp_avg_sq": v}


def _trusted(w, u, lr):
    """LAMB's step along `u`."""
    length = np.sqrt(squares(u))
    return w - lr * (np.sqrt(squares(w)) / length) * u if length else w


def lamb(w, state, g, lr, iteration, eps, beta1, beta2, weight_decay):
    m, v, m_hat, v_hat = _moments(state, g, g * g, iteration, beta1, beta2)
    return _trusted(w, m_hat / (np.sqrt(v_hat) + eps) + weight_decay * w, lr), {"momentum1": m, "exp_avg_sq": v}


def partial_rowwise_lamb(w, state, g, lr, iteration, eps, beta1, beta2, weight_decay):
    m, v, m_hat, v_hat = _moments(state, g, squares(g) / F32(len(g)), iteration, beta1, beta2)
    scale = F32(1) / (np.sqrt(v_hat) + eps)
    return _trusted(w, m_hat * scale + weight_decay * w, lr), {"momentum1": m, "exp_avg_sq": v}


FORMULAS = {
    formula.__name__: formula
    for formula in (
        sgd, momentum_sgd, adagrad, rowwise_adagrad, lars_sgd, adam, partial_rowwise_adam, lamb, partial_rowwise_lamb,
    )
}  # fmt: skip


def stepped(kind, records, positions, gradients, lr, iteration, fixed=None):
    """A copy of records (P, W) after a step."""
    found, records, dim = optimizer(kind), records.copy(), gradients.shape[1]
    schema = found.schema(dim)
    columns = {name: slice(*schema.columns(name)) for name in ("weight", *(field.name for field in schema.state))}
    values = {name: F32(value) for name, value in found.complete(fixed or {}).items()}
    for position, g in zip(positions, gradients, strict=True):
        row = records[position]
        state = {f.name: row[columns[f.name]][0] if f.per_row else row[columns[f.name]] for f in schema.state}
        weight, state = FORMULAS[kind](row[columns["weight"]].copy(), state, g, F32(lr), iteration, **values)
        for name, value in {"weight": weight, **state}.items():
            assert np.asarray(value).dtype == F32, f"{kind}: {name} is {np.asarray(value).dtype}"
            row[columns[name]] = value
    return records


def variants(kind):
    """Hyperparameters to try: the defaults, and each with another value, in every mode that there is."""
    found = optimizer(kind)
    modes = [{}]
    for name, choices in found.choices.items():
        modes += [{name: choice} for choice in choices if choice != found.fixed[name]]
    others = {name: value / 2 if value else 0.3 for name, value in found.fixed.items() if name not in found.choices}
    tried = [{}, *modes[1:], *({**mode, name: value} for mode in modes for name, value in others.items())]
    return [*tried, *({**mode, **others} for mode in modes)]
