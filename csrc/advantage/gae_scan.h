// GAE as an associative scan from the right over (next value, next advantage).
#pragma once

#include "common/host_device.h"

namespace hybridengine {

// The effect of consecutive tokens on the (value, advantage) to their right:
// advantage -> a + b * value + c * advantage; value -> `value` if any of them is unmasked.
struct GaeMap {
  double a, b, c;
  double value;
  bool any;  // an unmasked token
};

HE_HOST_DEVICE GaeMap gae_identity() { return GaeMap{0, 0, 1, 0, false}; }

// One token: advantage = r - v + gamma * next_value + gamma * lam * next_advantage.
HE_HOST_DEVICE GaeMap gae_token(double reward, double value, double gamma, double lam) {
  return GaeMap{reward - value, gamma, gamma * lam, value, true};
}

// left(right(x)): `left` holds the tokens before those of `right`.
HE_HOST_DEVICE GaeMap gae_compose(const GaeMap& left, const GaeMap& right) {
  GaeMap map;
  map.any = left.any || right.any;
  map.value = left.any ? left.value : right.value;
  const double from_value = left.b + left.c * right.b;
  map.a = left.a + left.c * right.a + (right.any ? left.b * right.value : 0);
  map.b = right.any ? left.c * right.b : from_value;
  map.c = left.c * right.c;
  return map;
}

}  // namespace hybridengine
