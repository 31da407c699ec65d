// A group to play with: totals, advantages and the push of each rollout under other weights.
"use strict";
const { rollouts, weights } = JSON.parse(document.getElementById("group-data").textContent);

// reward.efficiency_rewards, the step t = 1 .. n of a rollout
function efficiency(rollout, t, w) {
  const valid = rollout.valid[t - 1] ? 1 : 0;
  if (rollout.t_c < 0) return w.explore * valid;
  if (t <= rollout.t_c) return (w.effective_budget / rollout.t_c - w.effective_slope) * valid;
  return w.over_search;
}

// reward.score: the parts of each step's reward
function parts(rollout, w) {
  return rollout.valid.map((valid, i) => {
    const isLast = i === rollout.valid.length - 1;
    const quality = w.quality * rollout.quality[i];
    if (isLast) {
      const format = w.format * (valid ? w.valid_answer : w.invalid_answer);
      return { format, outcome: w.outcome * rollout.em, efficiency: 0, quality };
    }
    const format = w.format * (valid ? w.valid_search : w.invalid_search);
    const cost = rollout.searched[i] ? w.search_cost : 0;
    return { format, outcome: 0, efficiency: efficiency(rollout, i + 1, w) - cost, quality };
  });
}

function sum(numbers) {
  return numbers.reduce((a, b) => a + b, 0);
}

// train.total_rewards and group_advantages
function groupAdvantages(steps) {
  const rewards = steps.map((row) => sum(row.map((part) => sum(Object.values(part)))));
  const totals = rewards.map((reward) => Math.round(1e6 * reward) / 1e6);
  const mean = sum(totals) / totals.length;
  const std = Math.sqrt(sum(totals.map((total) => (total - mean) ** 2)) / (totals.length - 1));
  const isEqual = totals.every((total) => total === totals[0]);
  return { totals, advantages: totals.map((total) => (isEqual ? 0 : (total - mean) / std)) };
}

function show() {
  const w = { ...weights };
  for (const slider of document.querySelectorAll("#sliders input")) {
    w[slider.name] = Number(slider.value);
    slider.nextElementSibling.textContent = Number(slider.value).toFixed(4);
  }
  const steps = rollouts.map((rollout) => parts(rollout, w));
  const { totals, advantages } = groupAdvantages(steps);
  rollouts.forEach((_, i) => {
    steps[i].forEach((part, t) => {
      put(`step-${i}-${t}`, sum(Object.values(part)).toFixed(3));
      const named = Object.entries(part).filter(([, value]) => value !== 0);
      put(`parts-${i}-${t}`, named.map(([name, value]) => `${name} ${value.toFixed(3)}`).join(", "));
    });
    put(`total-${i}`, totals[i].toFixed(4));
    put(`advantage-${i}`, advantages[i].toFixed(3));
    const push = advantages[i] > 0 ? "▲ made likelier" : "▼ made less likely";
    put(`push-${i}`, advantages[i] === 0 ? "– no push" : push);
  });
}

function put(id, text) {
  document.getElementById(id).textContent = text;
}

// page.html#over_search=-0.2&quality=0 opens with these weights.
for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
  const slider = document.querySelector(`#sliders input[name="${CSS.escape(name)}"]`);
  if (slider) slider.value = value;
}
document.getElementById("sliders").addEventListener("input", show);
document.getElementById("sliders").addEventListener("reset", () => setTimeout(show));
show();
