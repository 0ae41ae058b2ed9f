"""Outer optimizers: what a round makes of the mean.

The outer parameters are what the last round left. Their distance from the mean
of the replicas is a pseudo-gradient, and any Keras optimizer may take a step
along it. These functions return the ones that papers have found good.
"""

import keras
import tensorflow as tf

__all__ = [
    "SlowMomentum",
    "diloco",
    "fed_adam",
    "fed_avg_momentum",
    "slow_momentum",
]


@keras.saving.register_keras_serializable("tf_avgstrategy")
class SlowMomentum(keras.optimizers.SGD):
    """SGD with a momentum that is kept in units of the inner gradients.

    With inner learning rate r, outer parameters x and their mean m over the
    replicas, a step is

        u = momentum * u + (x - m) / r
        x = x - learning_rate * r * u

    What is stored is `-learning_rate * r * u`, so nothing is divided by r, and
    the momentum of earlier rounds shrinks as r does. At r = 0 a step is what it
    is in the limit of small r: `learning_rate` of the way to the mean, so that
    local steps before a decay has reached 0 count. The momentum waits.
    """

    def build(self, variables):
        """See `keras.optimizers.Optimizer.build`."""
        super().build(variables)
        # Of the last step that moved: a scalar of its own.
        self.inner_learning_rate = self.add_variable(
            shape=(), name="inner_learning_rate"
        )

    def follow(self, inner_learning_rate):
        """Rescales the momentum to the inner learning rate of this round.

        Args:
            inner_learning_rate: Float32 scalar tensor. NaN: unknown, as the
                last one.
        """
        last = self.inner_learning_rate.value
        last = tf.cast(last, tf.float32)
        is_known = tf.logical_and(inner_learning_rate > 0, last > 0)
        ratio = tf.where(is_known, inner_learning_rate / last, 1.0)
        for momentum in self.momentums:
            momentum.assign(momentum.value * tf.cast(ratio, momentum.dtype))
        self.inner_learning_rate.assign(
            tf.where(inner_learning_rate > 0, inner_learning_rate, last)
        )


def slow_momentum(momentum=0.5, learning_rate=1.0):
    """Returns the outer optimizer of SlowMo, a momentum over rounds.

    With a constant inner learning rate this is blockwise model-update
    filtering (BMUF) with block momentum `momentum` and block learning rate
    `learning_rate`.

    Args:
        momentum: Float in [0, 1), the share of the last round's movement that
            is kept, beta in the paper. It used 0.5 to 0.7 for images and text.
        learning_rate: Float > 0, scales a round's movement, alpha in the paper.

    References:
        Wang et al., SlowMo: Improving Communication-Efficient Distributed SGD
        with Slow Momentum, ICLR 2020, https://arxiv.org/abs/1910.00643. Chen
        and Huo, Scalable Training of Deep Learning Machines by Incremental
        Block Training with Intra-Block Parallel Optimization and Blockwise
        Model-Update Filtering, ICASSP 2016.
    """
    return SlowMomentum(learning_rate, momentum=momentum)


def diloco(learning_rate=0.7, momentum=0.9):
    """Returns the outer optimizer of DiLoCo: SGD with Nesterov momentum.

    Args:
        learning_rate: Float > 0.
        momentum: Float in [0, 1).

    References:
        Douillard et al., DiLoCo: Distributed Low-Communication Training of
        Language Models, 2023, https://arxiv.org/abs/2311.08105.
    """
    return keras.optimizers.SGD(learning_rate, momentum=momentum, nesterov=True)


def fed_avg_momentum(learning_rate=1.0, momentum=0.9):
    """Returns the outer optimizer of FedAvgM: SGD with momentum.

    Args:
        learning_rate: Float > 0.
        momentum: Float in [0, 1).

    References:
        Hsu et al., Measuring the Effects of Non-Identical Data Distribution
        for Federated Visual Classification, 2019,
        https://arxiv.org/abs/1909.06335.
    """
    return keras.optimizers.SGD(learning_rate, momentum=momentum)


def fed_adam(learning_rate=0.01, beta_1=0.9, beta_2=0.99, epsilon=1e-3):
    """Returns the outer optimizer of FedAdam.

    It is Keras' Adam, which corrects the bias of its moments. Algorithm 2 of
    the paper does not, and so moves less in the first rounds.

    Args:
        learning_rate: Float > 0, eta in the paper.
        beta_1: Float in [0, 1).
        beta_2: Float in [0, 1).
        epsilon: Float > 0, the degree of adaptivity, tau in the paper.

    References:
        Reddi et al., Adaptive Federated Optimization, ICLR 2021,
        https://arxiv.org/abs/2003.00295.
    """
    return keras.optimizers.Adam(
        learning_rate, beta_1=beta_1, beta_2=beta_2, epsilon=epsilon
    )
