// The page of one or several runs: reads the JSON in #data and fills page.html.
"use strict";

// ------------------------------------------------------------------------------------- equations
// Mirrors of grpo.py, dpo.py, distill.py and reward_weighted.py: tests/extras/show/test_page.py compares them.
const clamp = (x, low, high) => Math.min(Math.max(x, low), high), mean = values => sum(values) / values.length;
const sum = values => values.reduce((total, x) => total + x, 0);
const std = (values, m = mean(values)) => Math.sqrt(sum(values.map(x => (x - m) ** 2)) / (values.length - 1));
const sigmoid = x => 1 / (1 + Math.exp(-x));
const logSigmoid = x => Math.min(x, 0) - Math.log1p(Math.exp(-Math.abs(x)));

// A surrogate takes a token's log-ratio, advantage and log-probability, the settings, and the mean log-ratio of
// its sequence. It returns its loss, the slope of that in the log-probability, and if the gradient is stopped.
const detached = (weight, A, logp, stopped = false) => [-weight * A * logp, -weight * A, stopped];
const SURROGATES = {
  clipped(logRatio, A, logp, o) {
    const r = Math.exp(logRatio), inside = clamp(r, 1 - o.clip_eps_low, 1 + o.clip_eps_high);
    return r * A > inside * A ? [-inside * A, 0, true] : [-r * A, -r * A, false];
  },
  cispo: (logRatio, A, logp) => detached(Math.min(Math.exp(logRatio), 5), A, logp, Math.exp(logRatio) > 5),
  sapo(logRatio, A) {
    const r = Math.exp(logRatio), tau = A > 0 ? 1 : 1.05, gate = sigmoid(tau * (r - 1));
    return [-gate * 4 / tau * A, -4 * gate * (1 - gate) * r * A, false];
  },
  vespo(logRatio, A, logp) {
    const [k, lambda] = A >= 0 ? [2, 3] : [3, 2];
    return detached(Math.exp(k * logRatio + lambda * (1 - Math.exp(logRatio))), A, logp);
  },
  dppo(logRatio, A, logp, o) {  // the clip range is one of probabilities
    const gain = Math.exp(logp) - Math.exp(logp - logRatio);
    const stopped = A < 0 ? gain < -o.clip_eps_low : A > 0 && gain > o.clip_eps_high;
    return detached(stopped ? 0 : Math.min(Math.exp(logRatio), 20), A, logp, stopped);
  },
  deepseek: (logRatio, A, logp, o, mean) =>  // what has drifted away is not pushed further down
    mean < -0.5 && A < 0 ? [0, 0, true] : SURROGATES.clipped(logRatio, A, logp, o),
};
// A normalizer: what a token of a sequence of n trained tokens counts in the step's loss.
const sequenceMean = (n, counts) => 1 / (n * counts.sequences), sequenceSum = (n, counts) => 1 / counts.sequences;
const tokenMean = (n, counts) => 1 / counts.tokens;
const constantMean = (n, counts) => 1 / (counts.sequences * counts.max_tokens);
// A loss: surrogate, normalizer, what stands for a sequence's log-ratios, its paper's settings.
const LOSSES = {
  grpo: ["clipped", sequenceMean], dapo: ["clipped", tokenMean, null, {clip_eps_high: 0.28}],
  dr_grpo: ["clipped", constantMean, null, {scale_rewards: "none"}],
  cispo: ["cispo", tokenMean], sapo: ["sapo", sequenceMean],
  gspo: ["clipped", sequenceMean, "mean", {clip_eps_low: 3e-4, clip_eps_high: 4e-4}],
  luspo: ["clipped", sequenceSum, "mean", {clip_eps_low: 2e-3, clip_eps_high: 2.5e-3}],
  vespo: ["vespo", tokenMean, "sum"], dppo: ["dppo", tokenMean],
  deepseek: ["deepseek", sequenceMean, null, {scale_rewards: "none"}],
};
const SCALES = {rloo: "none", gdpo: "batch", gigpo: "none"};  // of the paper of a credit
// A loss of a pair, whose log-ratios c and r are sums over tokens, and cm and rm means.
const PAIR_LOSSES = {
  sigmoid: ({c, r}, beta) => -logSigmoid(beta * (c - r)), hinge: ({c, r}, beta) => Math.max(0, 1 - beta * (c - r)),
  ipo: ({cm, rm}, beta) => (cm - rm - 1 / (2 * beta)) ** 2,
  bco_pair: ({c, r}, beta) => -logSigmoid(beta * c) - logSigmoid(-beta * r),
  sppo_hard: ({c, r}, beta) => (c - 0.5 / beta) ** 2 + (r + 0.5 / beta) ** 2,
  apo_zero: ({c, r}, beta) => 1 - sigmoid(beta * c) + sigmoid(beta * r),
  sigmoid_norm: ({cm, rm}, beta) => -logSigmoid(beta * (cm - rm)),
};
const COLUMNS = ["advantage", "ratio", "kl", "loss", "weight", "clipped",
  "chosen", "rejected", "chosen_mean", "rejected_mean", "nll"];  // these of dpo.py
const columns = tokens => Object.fromEntries(COLUMNS.map(name => [name, tokens.map(t => t[name] ?? 0)]));

function klEstimate(logp, ref, old, kind) {  // [value, its slope in logp]
  const x = logp - ref, k3 = Math.exp(-x) - 1 + x, slope = 1 - Math.exp(-x), r = Math.exp(logp - old);
  return {k2: [x * x / 2, x], k3: [k3, slope], k3_ratio: [k3 * r, (slope + k3) * r]}[kind];
}
const members = ids => [...new Set(ids)].map(id => ids.flatMap((other, i) => other === id ? [i] : []));  // of each id
const divisor = (rewards, groupRewards, scale) => scale === "none" ? 1 : scale === "mean" ? mean(groupRewards)
  : std(scale === "batch" ? rewards : groupRewards) + 1e-4;

function groupAdvantages(rewards, ids, scale, leaveOneOut = false) {
  const advantages = rewards.map(() => 0);
  for (const group of members(ids)) {
    const shifted = group.map(i => rewards[i] - rewards[group[0]]), middle = mean(shifted);
    if (!shifted.some(Boolean)) continue;
    const by = divisor(rewards, group.map(i => rewards[i]), scale) * (leaveOneOut ? 1 - 1 / group.length : 1);
    group.forEach((i, k) => { advantages[i] = (shifted[k] - middle) / by; });
  }
  return advantages;
}

// A credit takes episodes {group, rewards: of the turns, states, parts} and returns a list of turns for each.
const returnsToGo = (values, gamma = 1) => values.map((_, k) => sum(values.slice(k).map((r, j) => gamma ** j * r)));
const totals = episodes => episodes.map(t => sum(t.rewards)), groups = episodes => episodes.map(t => t.group);
const logRatios = ({logp, ref, old}) => logp.map((x, i) => x - (ref || old)[i]);  // of dpo.py
const splitLike = (values, episodes, start = 0) => episodes.map(t => values.slice(start, start += t.rewards.length));
const groupsBy = (peersOf, episodes) => episodes.flatMap(t => t.rewards.map((_, k) => `${peersOf(t, k)} ${t.group}`));
const ofAllTurns = (episodes, values) => episodes.map((t, i) => t.rewards.map(() => values[i]));
const returnsAmong = (peersOf, episodes, scale, gamma) => splitLike(
  groupAdvantages(episodes.flatMap(t => returnsToGo(t.rewards, gamma)), groupsBy(peersOf, episodes), scale), episodes);
const CREDITS = {
  episode: (episodes, scale, o, leaveOneOut = false) =>
    ofAllTurns(episodes, groupAdvantages(totals(episodes), groups(episodes), scale, leaveOneOut)),
  turn: (episodes, scale) => returnsAmong((t, k) => k, episodes, scale),
  return(episodes, scale) {  // the episode's advantage, less what its earlier turns have earned
    const returns = totals(episodes), values = groupAdvantages(returns, groups(episodes), scale);
    return episodes.map((t, i) => {
      const own = returns.filter((_, k) => episodes[k].group === t.group), by = divisor(returns, own, scale);
      return returnsToGo(t.rewards).map(x => own.every(r => r === own[0]) ? 0 : values[i] + (x - returns[i]) / by);
    });
  },
  process(episodes, scale) {
    const values = groupAdvantages(episodes.flatMap(t => t.rewards), groupsBy(() => "", episodes), scale);
    return splitLike(values, episodes).map(row => returnsToGo(row));
  },
  rloo: (episodes, scale, o) => CREDITS.episode(episodes, scale, o, true),
  gigpo(episodes, scale) {
    const whole = CREDITS.episode(episodes, scale), local = returnsAmong((t, k) => t.states[k], episodes, scale, 0.95);
    return whole.map((values, i) => values.map((x, k) => x + local[i][k]));
  },
  gdpo(episodes, scale, {reward_weights: weights}) {
    const total = episodes.map(() => 0);
    for (const [name, weight] of Object.entries(weights)) {
      const scored = episodes.flatMap(({parts}, i) => name in parts ? [i] : []), own = scored.map(i => episodes[i]);
      const values = groupAdvantages(own.map(({parts}) => parts[name]), groups(own), "group");
      scored.forEach((i, k) => { total[i] += weight * values[k]; });
    }
    return ofAllTurns(episodes, groupAdvantages(total, groups(episodes), scale));
  },
};

// What a loss does to a step's episodes {group, rewards, turn, logp, old, ref, sampled}: a row of
// COLUMNS for each, with an entry for each trained token. weight is d loss / d logp.
function tokenWeights(episodes, o, counts) {
  const [family, name] = o.loss.split(":");
  if (family === "dpo") return pairWeights(episodes, name, o);
  if (family === "distill") return distillWeights(episodes, counts);
  if (family in LOSSES) return surrogateWeights(episodes, o, counts);
  return likelihoodWeights(episodes, {imitate: () => 1, linear: above => clamp(above, 0, 20),
    exp: above => Math.min(Math.exp(above / o.beta), 20)}[name]);
}

function surrogateWeights(episodes, o, counts) {
  const [surrogate, normalizer, over] = LOSSES[o.loss], cap = o.importance_correction;
  const credits = CREDITS[o.credit](episodes, o.scale_rewards, o);
  return episodes.map(({logp, old, ref, sampled, turn}, e) => {
    const n = logp.length, total = sum(logp.map((x, i) => x - old[i])), share = normalizer(n, counts);
    return columns(logp.map((x, i) => {
      const logRatio = {mean: total / n, sum: total}[over] ?? x - old[i];
      const A = credits[e][turn[i]] * (cap ? Math.min(Math.exp(old[i] - sampled[i]), cap) : 1);
      const [loss, slope, stopped] = SURROGATES[surrogate](logRatio, A, x, o, total / n);
      const [kl, klSlope] = ref ? klEstimate(x, ref[i], old[i], o.kl_estimator) : [0, 0];
      return {advantage: A, ratio: Math.exp(logRatio), kl, loss: loss + o.kl_coef * kl,
        weight: share * (slope + o.kl_coef * klSlope), clipped: Number(stopped)};
    }));
  });
}
const distillWeights = (episodes, {tokens}) => episodes.map(({logp, old, ref}) => columns(logp.map((x, i) => {
  const A = (ref || old)[i] - x, ratio = Math.exp(x - old[i]);  // ref is the teacher
  return {advantage: A, ratio, loss: -ratio * A, weight: -ratio * A / tokens};
})));

function likelihoodWeights(episodes, weightOf) {  // sft.py, reward_weighted.py
  const weights = returnsAmong((t, k) => k, episodes, "none").map(above => above.map(weightOf));
  const ofTokens = episodes.map((t, e) => t.turn.map(k => weights[e][k])), total = sum(ofTokens.flat()) || 1;
  return episodes.map(({logp}, e) => columns(ofTokens[e].map((w, i) =>
    ({advantage: w, loss: -w * logp[i], weight: -w / total}))));
}

function pairWeights(episodes, name, o) {  // dpo.py, of the best and the worst of each group
  const rewards = totals(episodes), ofEpisode = episodes.map(() => ({}));
  const pairs = members(groups(episodes)).map(group => [...group].sort((a, b) => rewards[b] - rewards[a]))
    .map(group => [group[0], group.at(-1)]).filter(([best, worst]) => rewards[best] > rewards[worst]);
  for (const [best, worst] of pairs) {
    const [c, r] = [best, worst].map(e => sum(logRatios(episodes[e]))), {logp} = episodes[best], n = logp.length;
    const m = episodes[worst].logp.length, loss = (up, down) => PAIR_LOSSES[name]({c: c + up, r: r + down,
      cm: (c + up) / n, rm: (r + down) / m}, o.beta) - (o.sft_coef || 0) * (sum(logp) + up) / n;
    const h = 1e-4, slope = (up, down) => (loss(up, down) - loss(-up, -down)) / (2 * h) / pairs.length;
    const known = {chosen: c, rejected: r, chosen_mean: c / n, rejected_mean: r / m, nll: -mean(logp)};
    ofEpisode[best] = {...known, loss: loss(0, 0), advantage: 1, weight: slope(h, 0)};
    ofEpisode[worst] = {...known, loss: loss(0, 0), advantage: -1, weight: slope(0, h)};
  }
  return episodes.map(({logp}, e) => columns(logp.map(() => ofEpisode[e])));  // all have one slope
}

// The 95 % interval of a difference of two shares, from theirs: Newcombe 1998, method 10.
const difference = (p1, [low1, high1], p2, [low2, high2]) => [p2 - p1,
  p2 - p1 - Math.hypot(p2 - low2, high1 - p1), p2 - p1 + Math.hypot(high2 - p2, p1 - low1)];

// ------------------------------------------------------------------------------------------ data
// What one looks at: places in DATA; an episode's is that in its group sorted by reward.
const state = {run: 0, step: 0, group: 0, episode: 0, token: null, pinned: false, last: true,
  colour: "advantage", whatIf: null, task: 0, left: 0, right: 1e9};
const revealed = new Set();  // episodes whose advantage the class has seen
const asked = new Map();  // episode -> its row of tokenWeights, with `differs`
const decoded = [new Map(), new Map()];  // of the first and the last update: episode -> numbersOf it
const plots = [];
let DATA, STEPS, palette;  // STEPS: for each run [[step, its groups]]

const theRun = () => DATA.runs[state.run], theGroups = () => STEPS[state.run][state.step]?.[1] || [];
const theGroup = () => theGroups()[state.group], theEpisode = () => theGroup().episodes[state.episode];
const goTo = change => show({token: null, pinned: false, group: 0, episode: 0, ...change});
const isHidden = episode => document.body.classList.contains("class") && !revealed.has(episode);
const reveal = episodes => show(void episodes.forEach(episode => revealed.add(episode)));
const tells = name => /advantage|weight|clipped/.test(name);  // what a class is to predict

function stepsOf(run) {
  const all = [...(run.groups || []), ...(run.pairs || []).map(p => ({...p, episodes: [p.chosen, p.rejected]}))];
  for (const group of all) if (!group.chosen) group.episodes.sort((a, b) => b.reward - a.reward);
  return members(all.map(group => group.step)).map(places => [all[places[0]].step, places.map(i => all[i])])
    .sort(([a], [b]) => a - b);
}

// An episode's numbers at the update one looks at: lists with an entry for each trained token.
function numbersOf(episode) {
  const known = decoded[Number(state.last)], updates = episode.updates || [];
  if (known.has(episode)) return known.get(episode);
  const update = {...updates[0], ...updates.at(state.last ? -1 : 0)};  // the last repeats not all
  const n = {sampled: floats(episode.sampled_f32), clipped: update.clipped};
  for (const name of ["advantage", "old", "new", "ref", "entropy", "weight"]) n[name] = floats(update[`${name}_f32`]);
  n.old ??= n.sampled;
  n.new ??= n.old;
  n.probability = n.sampled?.map(Math.exp);
  n.ratio = n.old && n.new.map((x, i) => Math.exp(x - n.old[i]));
  const ends = episode.turns.filter(turn => turn.trained).map(turn => turn.end);
  n.turn = episode.at.map(t => Math.max(0, ends.findIndex(end => t < end)));
  known.set(episode, n);
  return n;
}
const askedOf = episode => ({...numbersOf(episode), ...(state.whatIf && asked.get(episode))});

// What a colour needs, stands for and writes in the legend. two: below 0 orange, above 0 blue.
const COLOURS = {
  trained: {of: () => 0},
  advantage: {needs: "advantage", two: true, of: (n, i) => n.advantage[i]},
  weight: {needs: "weight", two: true, of: (n, i) => -n.weight[i]},
  probability: {needs: "sampled", of: (n, i) => -n.sampled[i], write: x => number(Math.exp(-x))},
  ratio: {needs: "old", two: true, of: (n, i) => Math.log(n.ratio[i]), write: x => number(Math.exp(x))},
  clipped: {needs: "clipped", of: (n, i) => n.clipped[i]},
  KL: {needs: "ref", two: true, of: (n, i) => n.new[i] - n.ref[i]},
  entropy: {needs: "entropy", of: (n, i) => n.entropy[i]},
};

// ----------------------------------------------------------------------------------------- tools
const find = id => document.getElementById(id), every = selector => document.querySelectorAll(selector);
const css = name => getComputedStyle(document.body).getPropertyValue(name).trim();
const short = (text, n) => text.length > n ? `${text.slice(0, n - 1)}…` : text;
const signed = x => (x > 0 ? "+" : "") + number(x), percent = share => `${100 * share}%`;
const metricTitle = name => [name, ...(DATA.metrics?.[name] || [])].filter(Boolean).join(" · ");
const floats = value => typeof value !== "string" ? value  // base64 of float32s, a list, or null
  : [...new Float32Array(Uint8Array.from(atob(value), c => c.charCodeAt(0)).buffer)];
const largestOf = values => values.reduce((most, x) => Math.abs(x) > most ? Math.abs(x) : most, 0);

function number(x) {
  if (x == null || !Number.isFinite(x)) return String(x ?? "–");
  if (Math.abs(x) >= 1000) return x.toLocaleString("en", {maximumFractionDigits: 0});
  const tiny = x !== 0 && Math.abs(x) < 1e-3;
  return (tiny ? x.toExponential(1) : String(Number(x.toPrecision(3)))).replaceAll("-", "−");
}

// h("p.note", {title: "why"}, "text") makes an element. Text only ever becomes text.
function h(tag, attributes = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const node = Object.assign(document.createElement(name), {className: classes.join(" ")});
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "style") Object.assign(node.style, value);
    else if (key.startsWith("on")) node[key] = value;
    else if (value != null && value !== false) node.setAttribute(key, value);
  }
  return put(node, children);
}

function put(target, ...children) {  // what is null or false is left out
  const node = typeof target === "string" ? find(target) : target;
  node.replaceChildren(...children.flat(4).filter(child => child || child === 0));
  return node;
}

function colourOf(share, two) {  // of -1 .. 1: orange, zero (white, grey in the dark), blue
  const end = palette[two && share > 0 ? 2 : 1], part = Math.min(Math.abs(share), 1) ** 0.75;
  return `rgb(${palette[0].map((c, i) => Math.round(c + part * (end[i] - c)))})`;
}

function bar(x, low, high, middle) {  // from 0 to x, with a line at the middle
  const at = y => percent((y - low) / (high - low || 1)), width = percent(Math.abs(x) / (high - low || 1));
  return h("span.track", {}, h(x < 0 ? "i.down" : "i.up", {style: {left: at(Math.min(0, x)), width}}),
    middle != null && h("em", {style: {left: at(middle)}}));
}
const callText = ({name, arguments: values, error}) => `${name}(${short(Object.values(values ?? {})
  .map(v => typeof v === "string" ? v : JSON.stringify(v)).join(", "), 80)})${error ? " ✗" : ""}`;
const solvedOf = episodes => episodes.some(e => e.success != null)
  && `${episodes.filter(e => e.success).length} of ${episodes.length} right`;
const statistics = ({silent, chosen, margin, mean, std, episodes}) => [chosen ? `margin ${number(margin)}`
  : solvedOf(episodes), silent ? "teaches nothing" : mean != null && `mean ${number(mean)}, std ${number(std)}`]
  .filter(Boolean).join(", ");
const rewardsOf = items => items.flatMap(({episodes}) => episodes.map(e => e.reward ?? 0));
const rewardRange = items => [Math.min(0, ...rewardsOf(items)), Math.max(0, ...rewardsOf(items))];
const rewardBars = ({episodes}, [low, high]) => h("span.bars", {}, episodes.map(e =>
  h("i", {style: {height: percent(0.1 + 0.9 * ((e.reward ?? 0) - low) / (high - low || 1))}})));

// ------------------------------------------------------------------------------ steps and groups
function show(change = {}) {
  Object.assign(state, change);
  state.step = clamp(state.step, 0, Math.max(0, STEPS[state.run].length - 1));
  state.group = clamp(state.group, 0, Math.max(0, theGroups().length - 1));
  if ((find("steps").hidden = !theGroup())) return;
  state.episode = clamp(state.episode, 0, theGroup().episodes.length - 1);
  for (const draw of [computeWhatIf, drawStep, drawGroup, drawColours, drawEpisode, drawToken]) draw();
}

function drawRun() {
  const run = theRun(), {algorithm, name, steps, held_out: held, seconds, changed = {}, flags = {}} = run;
  const best = ["success", "pairs/accuracy", "held_out_loss", "loss", "reward"].find(key => run.after?.[key] != null);
  put("algorithm", algorithm, " ", h("small", {id: "run"}, name));
  put("facts", [held && `${held} held-out tasks`, `${steps.length} steps`, seconds && `${Math.round(seconds)} s`,
    ...Object.entries(changed).map(([flag, value]) => `--${flag} ${value}`)].filter(Boolean).join(" · "));
  put("result", best && [h("span", {title: metricTitle(best)}, best), outcome(run, best)]);
  put("runs", DATA.runs.map((r, i) => h("option", {value: i, selected: r === run}, r.name))).hidden = !DATA.runs[1];
  put("flags", Object.entries(flags).map(([k, value]) => h("div", {}, h("dt", {}, k), h("dd", {}, String(value)))));
}

function outcome({before, after}, name) {  // "0.5 → 0.9" and both 95 % intervals from 0 to 1
  const intervals = [[before, "before"], [after, "after"]].map(([part, kind]) => {
    const [low, high] = part?.[`${name}_interval`] || [];
    return low != null && h(`span.${kind}`, {}, h("em", {style: {left: percent(part[name])}}),
      h("i", {style: {left: percent(low), width: percent(high - low)}}));
  });
  return [h("b.before", {}, number(before?.[name])), " → ", h("b.after", {}, number(after?.[name])),
    intervals.some(Boolean) && h("span.intervals", {title: "95 % intervals, from 0 to 1"}, intervals)];
}

function drawStep() {
  const steps = STEPS[state.run], [step, groups] = steps[state.step], rows = theRun().steps;
  const line = rows.find(row => row.step === step) || {}, range = rewardRange(groups);
  put("where", h("b", {}, `Step ${step}`), ` of ${rows.at(-1)?.step ?? step}`,
    ["success", "reward", "accuracy", "loss"].filter(name => line[name] != null).slice(0, 2)
      .map(name => h("span", {title: metricTitle(name)}, ` · ${name} ${number(line[name])}`)));
  Object.assign(find("step"), {max: steps.length - 1, value: state.step});
  for (const plot of plots) plot.redraw(false);
  put("chips", groups.map((group, g) => h(`button.chip.${group.silent ? "silent" : "teaches"}`,
    {"aria-pressed": g === state.group, title: group.silent, onclick: () => goTo({group: g})},
    rewardBars(group, range), h("span", {}, short(group.task, 36), h("small", {}, statistics(group))))));
}

function drawGroup() {
  const group = theGroup(), {episodes} = group, added = state.whatIf?.reward_added ?? 0;
  const rewards = episodes.map((e, i) => (e.reward ?? 0) + (i === state.episode ? added : 0));
  const [low, high, middle] = [Math.min(0, ...rewards), Math.max(0, ...rewards), group.chosen ? null : mean(rewards)];
  const advantages = episodes.map(e => state.whatIf && asked.get(e) ? mean(asked.get(e).advantage) : e.advantage);
  const largest = largestOf(advantages.map(a => a ?? 0));
  put("task", group.task);
  put("statistics", statistics(group), group.chosen ? " · implicit rewards "
    + (group.implicit_reward || []).map(number).join(" and ") : "");
  put("silence", `This group teaches nothing: ${group.silent}.`).hidden = !group.silent;
  put("rows", episodes.map((episode, e) => h("div.row", {"aria-current": e === state.episode,
    onclick: () => show({episode: e, token: null, pinned: false})},
  h("div.reward", {}, h("b", {}, number(rewards[e])), bar(rewards[e], low, high, middle)),
  h("canvas.strip"), h("div.advantage", {}, isHidden(episode)
    ? h("button.guess", {title: "Predict it, then click.", onclick: () => reveal([episode])}, "?")
    : [bar(advantages[e] ?? 0, -largest, largest, 0), h("b", {}, signed(advantages[e]))]),
  h("div.calls", {}, group.chosen && ["chosen: ", "rejected: "][e],
    [...(episode.calls || []).map(callText), episode.stop_reason].filter(Boolean).join(" → "),
    Object.entries(episode.parts || {}).map(([k, x]) => h("small", {}, `  ${k} ${number(x)}`))))))
    .className = group.silent ? "silent" : "";
  every(".strip").forEach((canvas, e) => drawStrip(canvas, e, episodes[e]));
}

const isRecorded = name => !COLOURS[name].needs || Boolean(numbersOf(theEpisode())[COLOURS[name].needs]);

function colourNow() {  // what one asked for, if it was recorded and does not tell the class the answer
  const colour = [state.colour, "weight", "trained"].find(isRecorded);
  return tells(colour) && theGroup().episodes.some(isHidden) ? "trained" : colour;
}
const valuesOf = (episode, n, {needs, of} = COLOURS[colourNow()]) => episode.at.map((_, i) => n[needs] ? of(n, i) : 0);

function painter() {  // [the colour of a value, the largest value of the group, where it is full]
  const values = theGroup().episodes.flatMap(episode =>
    [...valuesOf(episode, numbersOf(episode)), ...valuesOf(episode, askedOf(episode))]);
  const largest = largestOf(values) || 1, {two} = COLOURS[colourNow()], own = css("--own");
  return colourNow() === "trained" ? [() => own, 0] : [x => colourOf(x / largest, two), largest];
}

function drawStrip(canvas, e, episode) {  // in a what-if its lower half
  const [colour] = painter(), pen = canvas.getContext("2d"), n = episode.tokens.length;
  const width = canvas.width = canvas.clientWidth * devicePixelRatio;
  const height = canvas.height = canvas.clientHeight * devicePixelRatio;
  const x = t => Math.round(t / n * width);
  const at = event => clamp(Math.floor(event.offsetX / canvas.clientWidth * n), 0, n - 1);
  pen.fillStyle = css("--context");
  pen.fillRect(0, height * 0.35, width, height * 0.3);
  [numbersOf(episode), askedOf(episode)].forEach((numbers, lane) => valuesOf(episode, numbers).forEach((value, i) => {
    const t = episode.at[i];
    pen.fillStyle = colour(value);
    pen.fillRect(x(t), lane * height / 2, x(t + 1) - x(t), height / 2);
  }));
  canvas.onmousemove = event => point(e, at(event));
  canvas.onclick = event => event.stopPropagation(show({episode: e, token: at(event), pinned: true}));
}

function drawColours() {
  const {two, write = signed} = COLOURS[colourNow()], [colour, largest] = painter();
  for (const button of every("[data-colour]")) {
    const name = button.dataset.colour;
    button.setAttribute("aria-pressed", name === colourNow());
    button.disabled = !isRecorded(name);
    if (name === colourNow()) put("meaning", button.title);
  }
  put("update", state.last ? "last update" : "first update");
  put("legend", largest > 0 && (two ? [-largest, 0, largest] : [0, largest]).map(x =>
    h("i", {style: {backgroundColor: colour(x)}}, write(x))));
}

// ---------------------------------------------------------------------------- episodes and tokens
function drawEpisode() {
  const {episodes, chosen} = theGroup(), [colour] = painter();
  put("episode", (chosen ? [0, 1] : [state.episode]).map(e => {
    const episode = episodes[e], n = askedOf(episode), values = valuesOf(episode, n);
    return talk(episode, chosen ? ["chosen", "rejected"][e] : `Episode ${e + 1} of ${episodes.length}`, (node, t) => {
      const i = episode.at.indexOf(t);
      node.onmouseenter = () => point(e, t);
      node.onclick = () => show({episode: e, token: t, pinned: !(state.pinned && state.token === t)});
      if (i < 0) return;
      node.style.backgroundColor = colour(values[i]);
      node.classList.toggle("clipped", Boolean(n.clipped?.[i]) && !isHidden(episode));
      node.classList.toggle("differs", Boolean(n.differs?.[i]));
    });
  })).className = chosen ? "beside" : "";
}

// An episode's turns: what the policy wrote is open, context and tool results are folded.
function talk(episode, title, decorate) {
  const rewards = [...(episode.turn_rewards || [])], facts = [`reward ${number(episode.reward)}`,
    `${episode.tokens.length} tokens`, `${episode.at.length} trained`, episode.stop_reason];
  return h("div.talk", {}, h("h3", {}, title, h("small", {}, `  ${facts.filter(Boolean).join(", ")}`)),
    episode.turns.map(({role, start, end, trained}, place) => {
      const text = h("pre", {}, episode.tokens.slice(start, end).map((token, k) => {
        const node = h(trained ? "i.tok.trained" : "i.tok", {"data-t": start + k}, token.replaceAll("\n", "↵\n"));
        decorate(node, start + k);
        return node;
      }));
      if (trained) {
        const reward = rewards.shift(), kind = reward > 0 ? "up" : reward < 0 ? "down" : "none";
        return h("div.turn.assistant", {}, h("span.role", {}, role), text,
          reward != null && h(`b.badge.${kind}`, {title: "reward of this turn"}, signed(reward)));
      }
      const results = (episode.calls || []).filter(call => call.turn === place - 1)
        .map(call => `${callText(call)} = ${call.result}`).join("; ");
      return h(`details.turn.${role}`, {}, h("summary", {}, h("span.role", {}, role),
        short(results || text.textContent.replaceAll("↵", ""), 120)), text);
    }));
}
const point = (episode, token) => !state.pinned && (episode === state.episode || theGroup().chosen)
  && drawToken(Object.assign(state, {episode, token}));

function drawToken() {
  const episode = theEpisode(), t = state.token in episode.tokens ? state.token : null, i = episode.at.indexOf(t);
  every(".tok.here").forEach(node => node.classList.remove("here"));
  find("episode").children[theGroup().chosen ? state.episode : 0]
    .querySelector(`[data-t="${t}"]`)?.classList.add("here");
  find("token").className = t == null ? "empty" : i < 0 ? "context" : "";
  if (t == null) return;
  put("text", episode.tokens[t].replaceAll("\n", "↵"));
  put("place", `${episode.turns.find(({end}) => t < end).role}, token ${t}, id ${episode.ids[t]}`);
  for (const node of every("[data-fact]")) {
    const name = node.dataset.fact, value = numbersOf(episode)[name]?.[i];
    put(node, number(value)).parentNode.hidden = value == null || tells(name) && isHidden(episode);
  }
  drawEquation(episode, i);
}

// The loss of a token with its numbers filled in, and the line of the run's file that computed it.
function drawEquation(episode, i) {
  const o = state.whatIf || settingsOf(theRun()), row = asked.get(episode), [family, name] = o.loss.split(":");
  if ((find("equation").hidden = i < 0 || !row || isHidden(episode))) return;
  const token = Object.fromEntries(COLUMNS.map(column => [column, row[column][i]])), A = token.advantage;
  const values = {...o, ...token, A, w: A, r: token.ratio, KL: token.kl, logp: numbersOf(episode).new[i],
    e_low: o.clip_eps_low, e_high: o.clip_eps_high, tau: A > 0 ? 1 : 1.05, k: A < 0 ? 3 : 2, lambda: A < 0 ? 2 : 3};
  const formula = (find("whatif").querySelector(`[value="${o.loss}"]`)?.closest("[data-formula]").dataset.formula ?? "")
    + (o.kl_coef && LOSSES[family] ? " + kl_coef · KL" : o.sft_coef && family === "dpo" ? " + sft_coef · nll" : "");
  put("loss", `${state.whatIf ? "What if: " : ""}${name || family}`);
  put("formula", formula);
  put("filled", "= ", formula.split(/([A-Za-z_]+)/).map(word => word in values
    ? h("b", {title: word}, number(values[word]).replace(/^−.*/, "($&)")) : word), " = ",
  h("b.sum", {}, number(token.loss)));
  put("slope", number(token.weight), token.clipped ? ": the clip stops it" : "");
  const source = (theRun().equations || []).find(({loss}) => loss === (name || family));
  put("source", source && `${source.file}:${source.line}  ${source.code}`);
}

// --------------------------------------------------------------------------------------- what if
function settingsOf({algorithm, flags = {}, reward_weights}) {
  const loss = {sft: "sft:imitate",reward_weighted: `reward_weighted:${flags.weighting}`, distill: "distill:reverse_kl",
    dpo: `dpo:${(flags.loss || "sigmoid").split(",")[0]}`}[algorithm] || flags.loss || "grpo";
  return {credit: "episode", clip_eps_low: 0.2, clip_eps_high: 0.2, kl_coef: 0, beta: 0.1, sft_coef: 1,
    kl_estimator: "k3_ratio", ...flags, reward_weights, loss, reward_added: 0,
    scale_rewards: flags.scale_rewards || "group"};
}

function inputOf(episode, group, g, added) {  // of tokenWeights
  const {turn, new: logp, old, ref, sampled} = numbersOf(episode), last = largestOf(turn);
  const rewards = Array.from({length: last + 1}, (_, k) => episode.turn_rewards?.[k] ?? 0);
  if (group.chosen) rewards[last] += (episode === group.chosen) - sum(rewards);
  if (episode === theEpisode()) rewards[last] += added;
  return {group: g, rewards, turn, logp, old, ref, sampled, states: episode.states ?? [], parts: episode.parts ?? {}};
}

function missing({loss, credit, importance_mode: mode, reward_weights}) {  // what the page cannot compute
  const [family, name] = loss.split(":"), isGrpo = family in LOSSES;
  if (!isGrpo && !(name in PAIR_LOSSES) && !/^(distill|sft|reward_weighted)$/.test(family)) return `loss ${loss}`;
  if (isGrpo && !(credit in CREDITS)) return `credit ${credit}`;
  if (isGrpo && /mask|sequence/.test(mode)) return `importance_mode ${mode}`;
  return isGrpo && credit === "gdpo" && !reward_weights && "credit gdpo: it takes two --rewards or more, and no veto";
}

// Adam divides a loss's scale away, so what is compared is how it shares its push among the tokens.
function computeWhatIf() {
  const o = {...settingsOf(theRun()), ...state.whatIf}, groups = theGroups(), lacking = missing(o);
  asked.clear();
  put("outcome", state.whatIf && lacking && `The page cannot compute ${lacking}.`);
  if (lacking) return;
  const episodes = groups.flatMap(group => group.episodes);
  const inputs = groups.flatMap((group, g) => group.episodes.map(e => inputOf(e, group, g, o.reward_added)));
  const {episodes: played, sampled_tokens: each} = theRun().steps.find(row => row.step === groups[0].step) || {};
  const total = inputs.flatMap(t => t.logp).length, rows = tokenWeights(inputs, o,
    {max_tokens: o.max_tokens, sequences: played || episodes.length, tokens: Math.round(each * played) || total});
  const trained = episodes.map((episode, e) => numbersOf(episode).weight || rows[e].weight);
  const size = lists => sum(lists.flat().map(Math.abs)) || 1, least = 1e-3 * size(trained) / total;
  const scale = state.whatIf ? size(trained) / size(rows.map(row => row.weight)) : 1;
  const way = w => Math.abs(w) < least ? 0 : Math.sign(w), found = {ways: 0, sizes: 0};
  rows.forEach((row, e) => {
    row.weight = row.weight.map(w => w * scale);
    row.differs = row.weight.map((w, i) => state.whatIf && way(w) !== way(trained[e][i]));
    found.ways += row.differs.filter(Boolean).length;
    found.sizes += row.weight.filter((w, i) => !row.differs[i]
      && Math.abs(w - trained[e][i]) > 0.1 * Math.abs(trained[e][i]) + least).length;
    asked.set(episodes[e], row);
  });
  put("outcome", state.whatIf && `These two losses disagree on ${found.ways} of ${total} tokens of this step `
    + `(up against down or nothing), and by over 10 % in size on ${found.sizes} more.`);
}

function fillForm(values) {
  document.body.dataset.family = values.loss.split(":")[0];
  for (const input of find("whatif")) if (input.name in values) input.value = values[input.name];
  every("output").forEach(node => put(node, number(Number(find("whatif")[node.htmlFor.value].value))));
}

function ask({target: {name, type, value}}) {
  const values = {...settingsOf(theRun()), ...state.whatIf, [name]: type === "range" ? Number(value) : value};
  const scale = SCALES[values.credit];
  if (name === "credit" && scale) values.scale_rewards = LOSSES[values.loss]?.[3]?.scale_rewards ?? scale;
  if (name === "loss") Object.assign(values, {scale_rewards: scale ?? "group"}, LOSSES[value]?.[3]);
  fillForm(values);
  show({whatIf: values, colour: "weight"});
}

// ----------------------------------------------------------------------- the same task over steps
function occurrences() {  // [[task, [{label, episodes}]]] of what was played twice, in all runs
  const found = DATA.runs.flatMap((run, r) => {
    const name = DATA.runs.length > 1 ? `${run.name} ` : "";
    return [...(run.played || []).map(({when, episode}) =>
      ({task: "a held-out task, before and after", label: name + when, episodes: [episode]})),
    ...STEPS[r].flatMap(([step, groups]) => groups.map(group => ({...group, label: `${name}step ${step}`})))];
  });
  return members(found.map(({task}) => task)).filter(places => places.length > 1)
    .map(places => [found[places[0]].task, places.map(i => found[i])]);
}

function drawSame(right = state.right, task = state.task) {  // on the left stays what one saw before
  const tasks = occurrences(), [, items] = tasks[task] || [];
  if ((find("same").hidden = !items)) return;
  const fit = place => clamp(place, 0, items.length - 1), left = right === state.right ? state.left : state.right;
  Object.assign(state, {task, left: fit(left), right: fit(right)});
  const [now] = items[state.right].episodes, common = ({ids}) => [...ids, null].findIndex((id, t) => id !== now.ids[t]);
  const [earlier] = [...items[state.left].episodes].sort((a, b) => common(b) - common(a)), parting = common(earlier);
  put("tasks", tasks.map(([name], i) => h("option", {value: i, selected: i === task}, short(name, 80))));
  put("dots", items.map((item, i) => h("button", {"aria-pressed": i === state.right, onclick: () => drawSame(i)},
    rewardBars(item, rewardRange(items)), h("small", {}, item.label), h("small", {}, solvedOf(item.episodes)))));
  Object.assign(find("occurrence"), {max: items.length - 1, value: state.right});
  put("sides", [[state.left, earlier], [state.right, now]].map(([place, episode]) =>
    talk(episode, items[place].label, (node, t) =>
      t <= parting && node.classList.add(t < parting ? "common" : "parting"))));
}

// ---------------------------------------------------------------------------------------- curves
function drawCurves() {
  const rows = DATA.runs.flatMap(run => run.steps), names = [...new Set(rows.flatMap(Object.keys))]
    .filter(name => name !== "step" && rows.some(row => Number.isFinite(row[name])));
  const large = [...every("[data-names]")], pattern = node => new RegExp(`^(${node.dataset.names})$`);
  const rest = names.filter(name => !large.some(node => pattern(node).test(name)));
  plots.splice(0).forEach(plot => plot.destroy());
  find("curves").hidden = !names.length;
  for (const node of large) card(node, node.title, names.filter(name => pattern(node).test(name)));
  put("alarms", DATA.runs.flatMap((run, r) => (run.alarms || []).map(({step, text}) =>
    h("li", {}, h("button", {onclick: () => openStep(r, step)}, `▲ step ${step}`), ` ${text}`))));
  put("rest", `${rest.length} more numbers`);
  put("small", rest.map(name => card(h("figure"), name, [name])));
  put("timeline").names = ["success", "reward", "accuracy", "loss"].filter(name => names.includes(name)).slice(0, 1);
  plotCards();
}

function card(node, title, names) {
  Object.assign(node, {names: DATA.runs.length > 1 ? names.slice(0, 1) : names, hidden: !names.length});
  return put(node, h("figcaption", {title: names.map(metricTitle).join("\n")}, h("b", {}, title),
    h("small", {}, ` ${DATA.metrics?.[names[0]]?.[1] ?? ""}`)));
}

function plotCards() {  // all that are seen and have no curve yet
  for (const node of every("#timeline, figure")) {
    if (node.querySelector(".uplot") || node.closest("details:not([open])") || !node.names.length) continue;
    const isLine = node.id === "timeline", runs = isLine ? [theRun()] : DATA.runs, series = [{}];
    const steps = [...new Set(runs.flatMap(run => run.steps.map(row => row.step)))].sort((a, b) => a - b);
    const columns = [steps, ...runs.flatMap((run, r) => node.names.flatMap((name, k) => {
      const rows = new Map(run.steps.map(row => [row.step, row[name]])), stroke = css(`--line${(r + k) % 5}`);
      const values = steps.map(step => rows.get(step) ?? null), label = runs.length > 1 ? run.name : name;
      const dash = [[], [8, 4], [3, 4]][(r + k) % 3], last = values.findLast(Number.isFinite), points = {show: false};
      series.push({stroke: `${stroke}55`, width: 1},
        {stroke, width: 2.5, dash, label, points, value: (u, x, s, at) => number(at == null ? last : values[at])});
      return [values, smooth(values)];
    }))];
    const axis = {show: !isLine, stroke: css("--soft"), grid: {stroke: css("--line"), width: 1},
      ticks: {show: false}, font: "13px system-ui"};
    const plot = new uPlot({width: node.clientWidth - (isLine ? 0 : 32), series, legend: {show: !isLine},
      height: isLine ? 64 : node.closest("#small") ? 120 : 200, cursor: {drag: {x: false}, y: false},
      scales: {x: {time: false}, y: {range: rangeOf}}, hooks: {draw: [u => drawMarks(u, runs, node.names[0])]},
      axes: [axis, {...axis, size: 50, values: (u, ticks) => ticks.map(number)}]}, columns, node);
    plot.over.onclick = () => openStep(state.run, steps[plot.cursor.idx] ?? 0);
    plots.push(plot);
  }
}

const smooth = (values, reach = Math.round(values.length / 16)) => values.map((x, i) => x == null ? null
  : mean(values.slice(Math.max(0, i - reach), i + reach + 1).filter(Number.isFinite)));
const rangeOf = (u, low, high, key, space = Math.max(0.08 * (high - low), 1e-3 * largestOf([low, high])) || 1) =>
  [low - space, high + space];

function drawMarks({ctx: pen, bbox: {left, top, width, height}, valToPos}, runs, name) {
  const p = devicePixelRatio, bottom = top + height;  // where one is, before and after, ALARMs
  const box = (x, from, to, half = p) => pen.fillRect(x - half, from, 2 * half, to - from);
  pen.fillStyle = css("--ink");
  if (theGroup()) box(valToPos(theGroup().step, "x", true), top, bottom);
  runs.forEach((run, r) => {
    if (runs.length > 1) pen.fillStyle = css(`--line${r % 5}`);
    for (const [part, x] of [[run.before, left + 5 * p], [run.after, left + width - 5 * p]]) {
      if (part?.[name] == null) continue;
      const y = value => clamp(valToPos(value, "y", true), top, bottom), middle = y(part[name]);
      const [low, high] = (part[`${name}_interval`] || []).map(y);
      box(x, high, low);
      box(x, middle - 4 * p, middle + 4 * p, 4 * p);
    }
    pen.fillStyle = css("--alarm");
    for (const {step} of run.alarms || []) {
      pen.fill(new Path2D(`M${valToPos(step, "x", true)},${bottom - 10 * p} l${6 * p},${10 * p} h${-12 * p} z`));
    }
  });
}

function openStep(run, step) {
  const away = STEPS[run].map(([s]) => Math.abs(s - step));
  if (run !== state.run) start({run});
  goTo({step: away.indexOf(Math.min(...away))});
  find("steps").scrollIntoView({behavior: "smooth"});
}

// --------------------------------------------------------------------------------- runs and keys
function drawCompare() {
  const {runs} = DATA, [first, ...others] = runs, text = (run, flag) => String(run.flags?.[flag] ?? "–");
  const row = (title, cell) => h("tr", {}, h("th", {}, title), runs.map(run => h("td", {}, cell(run))));
  const counted = run => run.after?.success_interval, differ = Object.keys(first.flags || {}).filter(flag =>
    flag !== "output_dir" && others.some(run => text(run, flag) !== text(first, flag)));
  find("compare").hidden = runs.length < 2;
  put("verdicts", others.filter(run => counted(run) && counted(first)).map(run => {
    const [d, low, high] = difference(first.after.success, counted(first), run.after.success, counted(run));
    return h("p", {}, h("b", {}, run.name), ` solves ${number(Math.abs(d))} ${d < 0 ? "less" : "more"} than `,
      `${first.name} (95 %: ${signed(low)} to ${signed(high)}): `,
      h("b", {}, `${low > 0 || high < 0 ? "beyond" : "within"} chance.`));
  }));
  put("differences", row("", run => h(`b.run${runs.indexOf(run) % 5}`, {}, run.name)),
    row("success", run => outcome(run, "success")), row("seconds", run => number(run.seconds)),
    differ.map(flag => row(`--${flag}`, run => text(run, flag))));
}

function onKey(event) {
  const {key, shiftKey, target} = event, {group, step, episode, token, colour} = state;
  if (!theGroup() || event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT/.test(target.tagName)) return;
  const way = /Left|PageUp|ArrowUp/.test(key) ? -1 : 1, {at} = theEpisode(), names = Object.keys(COLOURS);
  const hidden = theGroup().episodes.filter(isHidden), aside = /Arrow(Left|Right)/.test(key);
  const next = clamp(token == null ? 0 : at.findIndex(t => t >= token) + way, 0, at.length - 1);
  if (aside && shiftKey) goTo({step: step + way});
  else if (aside) show({token: at[next], pinned: true});
  else if (key === "r" || key === "PageDown" && hidden.length) reveal(hidden);
  else if (/Page/.test(key) || /Arrow/.test(key) && shiftKey) goTo({group: group + way});
  else if (/Arrow/.test(key)) show({episode: episode + way, token: null, pinned: false});
  else if (key === "c") show({colour: names[(names.indexOf(colour) + 1) % names.length]});
  else if (key === "Escape") show({token: null, pinned: false});
  else return;
  event.preventDefault();
}

function start(change = {}) {
  palette = ["--zero", "--down", "--up"].map(name => css(name).split(" ").map(Number));
  Object.assign(state, {whatIf: null, width: innerWidth, ...change});
  fillForm(settingsOf(theRun()));
  for (const draw of [drawRun, show, drawSame, drawCompare]) draw();
  requestAnimationFrame(drawCurves);
}

function main() {
  DATA = JSON.parse(find("data").textContent);
  STEPS = DATA.runs.map(stepsOf);
  put("written", DATA.written_by);
  find("runs").onchange = ({target}) => start({run: Number(target.value), step: 0});
  find("step").oninput = event => goTo({step: Number(event.target.value)});
  find("update").onclick = () => show({last: !state.last});
  find("class").onclick = ({target}) =>
    start(target.setAttribute("aria-pressed", document.body.classList.toggle("class")));
  find("whatif").oninput = ask;
  find("whatif").onreset = event => start(event.preventDefault());
  find("tasks").oninput = event => drawSame(1e9, Number(event.target.value), state.right = 0);
  find("occurrence").oninput = event => drawSame(Number(event.target.value));
  find("more").ontoggle = plotCards;
  every("[data-colour]").forEach(button => { button.onclick = () => show({colour: button.dataset.colour}); });
  document.onkeydown = onKey;
  onresize = () => innerWidth !== state.width && start();
  matchMedia("(prefers-color-scheme: dark)").onchange = () => start();
  start();
}

if (typeof document === "undefined") module.exports = {tokenWeights, LOSSES, CREDITS, difference};
else main();
