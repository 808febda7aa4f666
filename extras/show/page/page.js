// The page of one or several runs: it reads the JSON in #data and draws. Nothing here trains.
// Its parts: equations, data, tools, steps and groups, episodes, tokens, what if, curves, runs, keys.
"use strict";

// ------------------------------------------------------------------------------------- equations
// Mirrors of grpo.py, dpo.py and reward_weighted.py, held equal by tests/extras/show/test_page.py.
const clamp = (x, low, high) => Math.min(Math.max(x, low), high);
const sum = values => values.reduce((total, x) => total + x, 0);
const mean = values => sum(values) / values.length;
const sigmoid = x => 1 / (1 + Math.exp(-x));
const logSigmoid = x => Math.min(x, 0) - Math.log1p(Math.exp(-Math.abs(x)));

function std(values, correction = 1) {
  const middle = mean(values);
  return Math.sqrt(sum(values.map(x => (x - middle) ** 2)) / (values.length - correction));
}

// A surrogate takes a token's log-ratio, advantage, log-probability and the clip range. It returns
// its loss, the slope of the loss in the log-probability, and whether the clip stops the gradient.
const SURROGATES = {
  clipped(logRatio, A, logp, o) {
    const r = Math.exp(logRatio);
    const inside = clamp(r, 1 - o.clip_eps_low, 1 + o.clip_eps_high);
    const stopped = r * A > inside * A;
    return [-Math.min(r * A, inside * A), stopped ? 0 : -r * A, stopped];
  },
  cispo(logRatio, A, logp) {
    const r = Math.exp(logRatio);
    return [-Math.min(r, 5) * A * logp, -Math.min(r, 5) * A, r > 5];
  },
  sapo(logRatio, A) {
    const r = Math.exp(logRatio), tau = A > 0 ? 1 : 1.05;
    const gate = sigmoid(tau * (r - 1));
    return [-gate * 4 / tau * A, -4 * gate * (1 - gate) * r * A, false];
  },
  vespo(logW, A, logp) {
    const [power, decay] = A >= 0 ? [2, 3] : [3, 2];
    const phi = Math.exp(power * logW + decay * (1 - Math.exp(logW)));
    return [-phi * A * logp, -phi * A, false];
  },
};

// How the tokens' losses become the step's: the factor of a token of a sequence of n.
const NORMALIZERS = {
  sequence_mean: (n, counts) => 1 / (n * counts.sequences),
  sequence_sum: (n, counts) => 1 / counts.sequences,
  token_mean: (n, counts) => 1 / counts.tokens,
  constant_mean: (n, counts) => 1 / (counts.sequences * counts.max_tokens),
};

// over: whose log-ratio the surrogate takes. paper: the settings that --loss brings.
const CLIP = "-min(r A, clip(r, 1 - e_low, 1 + e_high) A)";
const LOSSES = {
  grpo: {of: "clipped", norm: "sequence_mean", formula: CLIP},
  dapo: {of: "clipped", norm: "token_mean", formula: CLIP, paper: {clip_eps_high: 0.28}},
  dr_grpo: {of: "clipped", norm: "constant_mean", formula: CLIP, paper: {scale_rewards: "none"}},
  cispo: {of: "cispo", norm: "token_mean", formula: "-sg(min(r, 5)) A logp"},
  sapo: {of: "sapo", norm: "sequence_mean", formula: "-(4 / tau) sigmoid(tau (r - 1)) A"},
  gspo: {of: "clipped", norm: "sequence_mean", over: "mean", formula: CLIP,
    paper: {clip_eps_low: 3e-4, clip_eps_high: 4e-4}},
  luspo: {of: "clipped", norm: "sequence_sum", over: "mean", formula: CLIP,
    paper: {clip_eps_low: 2e-3, clip_eps_high: 2.5e-3}},
  vespo: {of: "vespo", norm: "token_mean", over: "sum",
    formula: "-sg(r^k exp(lambda (1 - r))) A logp"},
};

// A loss of a pair. c, r: log-ratios of the chosen and the rejected, summed; cm, rm: their means;
// nll: -log p of the chosen, as dpo.py's Scores have it.
const PAIR_LOSSES = {
  sigmoid: (s, b) => -logSigmoid(b * (s.c - s.r)),
  hinge: (s, b) => Math.max(0, 1 - b * (s.c - s.r)),
  ipo: (s, b) => (s.cm - s.rm - 1 / (2 * b)) ** 2,
  exo_pair(s, b) {
    const x = b * (s.c - s.r), eps = 1e-3;
    return sigmoid(x) * (logSigmoid(x) - Math.log1p(-eps))
      + sigmoid(-x) * (logSigmoid(-x) - Math.log(eps));
  },
  nca_pair: (s, b) => -logSigmoid(b * s.c) - (logSigmoid(-b * s.c) + logSigmoid(-b * s.r)) / 2,
  robust: (s, b) => -logSigmoid(b * (s.c - s.r)),
  bco_pair: (s, b) => -logSigmoid(b * s.c) - logSigmoid(-b * s.r),
  sppo_hard: (s, b) => (s.c - 0.5 / b) ** 2 + (s.r + 0.5 / b) ** 2,
  apo_zero: (s, b) => 1 - sigmoid(b * s.c) + sigmoid(b * s.r),
  apo_down: (s, b) => sigmoid(b * s.c) + 1 - sigmoid(b * (s.c - s.r)),
  discopop(s, b) {
    const x = b * (s.c - s.r), m = sigmoid(x / 0.05);
    return -logSigmoid(x) * (1 - m) + Math.exp(-x) * m;
  },
  sft: s => s.nll,
  sigmoid_norm: (s, b) => -logSigmoid(b * (s.cm - s.rm)),
};

function klEstimate(logp, ref, old, kind) {  // [value, its slope in logp]
  const x = logp - ref;
  if (kind === "k2") return [x * x / 2, x];
  const k3 = Math.exp(-x) - 1 + x, slope = 1 - Math.exp(-x);
  if (kind === "k3") return [k3, slope];
  const r = Math.exp(logp - old);
  return [k3 * r, (slope + k3) * r];
}

function members(ids) {  // the indices of each id
  const groups = new Map();
  ids.forEach((id, i) => groups.set(id, [...(groups.get(id) || []), i]));
  return [...groups.values()];
}

function groupAdvantages(rewards, ids, scale, leaveOneOut = false) {
  const advantages = rewards.map(() => 0);
  for (const group of members(ids)) {
    if (group.length === 1) continue;
    const shifted = group.map(i => rewards[i] - rewards[group[0]]);
    const factor = leaveOneOut ? group.length / (group.length - 1) : 1;
    const by = divisor(rewards, shifted, scale), middle = mean(shifted);
    group.forEach((i, k) => { advantages[i] = factor * (shifted[k] - middle) / by; });
  }
  return advantages;
}

function divisor(rewards, groupRewards, scale) {
  return scale === "none" ? 1 : std(scale === "batch" ? rewards : groupRewards) + 1e-4;
}

const returnsToGo = values => values.map((_, k) => sum(values.slice(k)));

// A credit takes episodes {group, rewards of the turns} and returns a list of turns for each.
const CREDITS = {
  episode(episodes, scale, leaveOneOut = false) {
    const totals = episodes.map(t => sum(t.rewards));
    const values = groupAdvantages(totals, episodes.map(t => t.group), scale, leaveOneOut);
    return episodes.map((t, i) => t.rewards.map(() => values[i]));
  },
  turn(episodes, scale) {
    const peers = episodes.flatMap(t => t.rewards.map((_, k) => `${k} ${t.group}`));
    const returns = episodes.flatMap(t => returnsToGo(t.rewards));
    return splitLike(groupAdvantages(returns, peers, scale), episodes);
  },
  return(episodes, scale) {
    const returns = episodes.map(t => sum(t.rewards));
    const values = episodes.map(t => t.rewards.map(() => 0));
    for (const group of members(episodes.map(t => t.group))) {
      const first = returns[group[0]], shifted = group.map(i => returns[i] - first);
      if (!shifted.some(Boolean)) continue;
      const by = divisor(returns, shifted, scale), middle = first + mean(shifted);
      for (const i of group) {
        values[i] = returnsToGo(episodes[i].rewards).map(x => (x - middle) / by);
      }
    }
    return values;
  },
  process(episodes, scale) {
    const owners = episodes.flatMap(t => t.rewards.map(() => t.group));
    const values = groupAdvantages(episodes.flatMap(t => t.rewards), owners, scale);
    return splitLike(values, episodes).map(returnsToGo);
  },
  rloo: (episodes, scale) => CREDITS.episode(episodes, scale, true),
};

function splitLike(values, episodes) {
  let start = 0;
  return episodes.map(t => values.slice(start, start += t.rewards.length));
}

// reward_weighted.py's weights of turns, with its baseline "group" and its R the return-to-go.
function rewardWeights(episodes, weighting, beta, maxWeight = 20) {
  const returns = episodes.flatMap(t => returnsToGo(t.rewards));
  const peers = episodes.flatMap(t => t.rewards.map((_, k) => `${k} ${t.group}`));
  const above = groupAdvantages(returns, peers, "none");
  const weight = {exp: a => Math.min(Math.exp(a / beta), maxWeight),
    linear: a => clamp(a, 0, maxWeight)}[weighting];
  return splitLike(above.map(weight), episodes);
}

// What the loss of the setting `o` does to the tokens of a step. Its episodes are {group, rewards,
// turn, logp, old, ref, sampled}: ids and lists with an entry for each trained token or turn.
// Returns for each episode {advantage, ratio, loss, weight = d loss / d logp, stopped}.
function tokenWeights(episodes, o, counts) {
  const [family, name] = o.loss.includes(":") ? o.loss.split(":") : ["grpo", o.loss];
  const rows = episodes.map(t => {
    const zeros = () => t.logp.map(() => 0);
    return {advantage: zeros(), ratio: t.logp.map((x, i) => Math.exp(x - t.old[i])),
      loss: zeros(), weight: zeros(), kl: zeros(), stopped: zeros()};
  });
  if (family === "dpo") pairWeights(episodes, rows, name, o);
  else if (family === "grpo") surrogateWeights(episodes, rows, o, LOSSES[name], counts);
  else likelihoodWeights(episodes, rows, family === "sft" ? "" : name, o);
  return rows;
}

function surrogateWeights(episodes, rows, o, {of, norm, over}, counts) {
  const credits = CREDITS[o.credit](episodes, o.scale_rewards);
  episodes.forEach((t, e) => {
    const n = t.logp.length, row = rows[e];
    const total = sum(t.logp.map((x, i) => x - t.old[i]));
    const factor = NORMALIZERS[norm](n, counts);
    t.logp.forEach((logp, i) => {
      const logRatio = {mean: total / n, sum: total}[over] ?? logp - t.old[i];
      const cap = o.importance_correction;
      const A = credits[e][t.turn[i]] * (cap ? Math.min(Math.exp(t.old[i] - t.sampled[i]), cap) : 1);
      const [loss, slope, stopped] = SURROGATES[of](logRatio, A, logp, o);
      const [kl, klSlope] = t.ref ? klEstimate(logp, t.ref[i], t.old[i], o.kl_estimator) : [0, 0];
      row.advantage[i] = A;
      row.ratio[i] = Math.exp(logRatio);
      row.kl[i] = kl;
      row.loss[i] = loss + o.kl_coef * kl;
      row.weight[i] = factor * (slope + o.kl_coef * klSlope);
      row.stopped[i] = stopped;
    });
  });
}

function likelihoodWeights(episodes, rows, weighting, o) {  // sft.py, reward_weighted.py
  const turns = weighting ? rewardWeights(episodes, weighting, o.beta)
    : episodes.map(t => t.rewards.map(() => 1));
  const weights = episodes.map((t, e) => t.turn.map(k => turns[e][k]));
  const total = sum(weights.flat()) || 1;
  rows.forEach((row, e) => row.weight.forEach((_, i) => {
    row.advantage[i] = weights[e][i];
    row.loss[i] = -weights[e][i] * episodes[e].logp[i];
    row.weight[i] = -weights[e][i] / total;
  }));
}

function pairWeights(episodes, rows, name, o) {  // dpo.py, of the best and the worst of each group
  const pairs = [];
  for (const group of members(episodes.map(t => t.group))) {
    const byReward = [...group].sort((a, b) => sum(episodes[b].rewards) - sum(episodes[a].rewards));
    const [best, worst] = [byReward[0], byReward[byReward.length - 1]];
    if (sum(episodes[best].rewards) > sum(episodes[worst].rewards)) pairs.push([best, worst]);
  }
  const logRatio = t => sum(t.logp.map((x, i) => x - (t.ref || t.old)[i]));
  const chosenTokens = sum(pairs.map(([best]) => episodes[best].logp.length));
  for (const [best, worst] of pairs) {
    const [chosen, rejected] = [episodes[best], episodes[worst]];
    const at = (up, down) => pairLoss(name, {
      c: logRatio(chosen) + up, r: logRatio(rejected) + down, logp: sum(chosen.logp) + up,
      nc: chosen.logp.length, nr: rejected.logp.length, pairs: pairs.length, chosenTokens}, o);
    const h = 1e-4;  // all tokens of an episode have one slope
    const slopes = [(at(h, 0) - at(-h, 0)) / (2 * h), (at(0, h) - at(0, -h)) / (2 * h)];
    [best, worst].forEach((e, side) => rows[e].weight.forEach((_, i) => {
      rows[e].loss[i] = at(0, 0);
      rows[e].advantage[i] = side ? -1 : 1;
      rows[e].weight[i] = slopes[side] / pairs.length;
    }));
  }
}

function pairLoss(name, p, o) {
  const scores = {c: p.c, r: p.r, cm: p.c / p.nc, rm: p.r / p.nr,
    nll: -p.logp * p.pairs / p.chosenTokens};
  return PAIR_LOSSES[name](scores, o.beta) - (o.sft_coef || 0) * p.logp / p.nc;
}

// The 95 % interval of a difference of two shares, from theirs: Newcombe 1998, method 10.
function difference(p1, [low1, high1], p2, [low2, high2]) {
  const d = p2 - p1;
  return [d, d - Math.hypot(p2 - low2, high1 - p1), d + Math.hypot(high2 - p2, p1 - low1)];
}

// ------------------------------------------------------------------------------------------ data
function floats(value) {  // base64 of little-endian float32, a list, or null
  if (typeof value !== "string") return value;
  return new Float32Array(Uint8Array.from(atob(value), c => c.charCodeAt(0)).buffer);
}

// An episode's numbers at its first or last recorded update, decoded once: lists with an entry for
// each trained token, `slot` from the index of a token to its entry (-1: not trained), `turn`.
const decoded = new Map();
function numbersOf(episode, last) {
  const key = last ? 1 : 0;
  if (!decoded.has(episode)) decoded.set(episode, []);
  if (decoded.get(episode)[key]) return decoded.get(episode)[key];
  const updates = episode.updates || [], update = updates[last ? updates.length - 1 : 0] || {};
  const numbers = {sampled: floats(episode.sampled_f32), clipped: update.clipped};
  for (const name of ["advantage", "old", "new", "ref", "entropy", "weight"]) {
    numbers[name] = floats(update[`${name}_f32`]);
  }
  numbers.old ??= numbers.sampled;
  numbers.new ??= numbers.old;
  numbers.slot = new Int32Array(episode.tokens.length).fill(-1);
  episode.at.forEach((t, i) => { numbers.slot[t] = i; });
  const trained = episode.turns.filter(turn => turn.trained);
  numbers.turn = episode.at.map(t => Math.max(0, trained.findIndex(turn => t < turn.end)));
  decoded.get(episode)[key] = numbers;
  return numbers;
}

// The groups of a run. A pair of DPO is a group of two.
function groupsOf(run) {
  const pairs = (run.pairs || []).map(pair => ({...pair, isPair: true, silent: null,
    episodes: [pair.chosen, pair.rejected]}));
  return [...(run.groups || []), ...pairs];
}

// A choice of colour: a sentence, the value of a trained token, and how the legend writes it.
// Values below 0 are orange, above 0 blue; where none is below 0, all are orange.
const COLOURS = {
  trained: {says: "What the policy wrote itself is trained. All else is context.",
    of: () => 1},
  advantage: {says: "Better (blue) or worse (orange) than the group did.", signed: true,
    of: (n, i) => n.advantage[i], needs: "advantage"},
  weight: {says: "The push of the update on the token's log-probability: up (blue) or down "
    + "(orange). It is -d loss / d log p, read off the gradient of the run.", signed: true,
    of: (n, i) => -n.weight[i], needs: "weight"},
  probability: {says: "How surprising the token was when it was sampled. White: certain.",
    of: (n, i) => -n.sampled[i], needs: "sampled", write: x => `p ${number(Math.exp(-x))}`},
  ratio: {says: "Policy now / policy that sampled. White: 1. It leaves 1 within a step, by the "
    + "updates before.", signed: true, needs: "old", of: (n, i) => n.new[i] - n.old[i],
    write: x => number(Math.exp(x))},
  clipped: {says: "Where the ratio left the clip range: no push any more.", needs: "clipped",
    of: (n, i) => Number(n.clipped[i])},
  KL: {says: "How far the token's log-probability is from the reference: the policy the run "
    + "started from. Blue: more likely now.", signed: true, needs: "ref",
    of: (n, i) => n.new[i] - n.ref[i]},
  entropy: {says: "How undecided the policy was at this token, in nats. White: certain.",
    of: (n, i) => n.entropy[i], needs: "entropy"},
};

// What one looks at. `episode` is a place in the group sorted by reward, `token` one in its tokens.
const state = {run: 0, step: 0, group: 0, episode: 0, token: null, pinned: false, last: true,
  colour: "advantage", whatIf: null, klass: false, same: 0};
const guesses = new Map();  // group -> {episode: "up" | "down"}
const revealed = new Set();  // groups whose advantages the class has seen
let DATA = null, PLAY = [];  // the page's data; for each run its groups by step

const theRun = () => DATA.runs[state.run];
const stepsOf = () => PLAY[state.run];  // [[step, groups]]
const theGroups = () => stepsOf()[state.step]?.[1] || [];
const theGroup = () => theGroups()[state.group];
const sorted = group => group.isPair ? group.episodes
  : [...group.episodes].sort((a, b) => b.reward - a.reward);
const theEpisode = () => sorted(theGroup())[state.episode];
const isHidden = group => state.klass && !revealed.has(group);

// ----------------------------------------------------------------------------------------- tools
const find = id => document.getElementById(id);
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function fill(node, tag, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") Object.assign(node.style, value);
    else if (value !== false && value != null) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat(2).filter(child => child != null && child !== false));
  return node;
}

// h("p.note", {title: "why"}, "text"): text is only ever put in as text.
function h(tag, attributes = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const node = document.createElement(name);
  if (classes.length) node.className = classes.join(" ");
  return fill(node, tag, attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), tag, attributes, children);
}

function number(x) {
  if (x == null || typeof x !== "number") return x == null ? "–" : String(x);
  if (!Number.isFinite(x)) return String(x);
  if (Number.isInteger(x) || Math.abs(x) >= 1000) return x.toLocaleString("en", {maximumFractionDigits: 0});
  const text = Math.abs(x) < 1e-3 ? x.toExponential(1) : String(Number(x.toPrecision(3)));
  return text.replace("-", "−");
}

const signed = x => (x > 0 ? "+" : "") + number(x);
const short = (text, n) => text.length > n ? `${text.slice(0, n - 1)}…` : text;

function colourOf(x, isSigned) {  // of a value in -1 .. 1; zero is white, or the dark ground
  const end = x < 0 || !isSigned ? palette.orange : palette.blue;
  const share = Math.min(Math.abs(x), 1) ** 0.75;
  return `rgb(${end.map((c, i) => Math.round(palette.zero[i] + share * (c - palette.zero[i]))).join()})`;
}

let palette = null;
function readPalette() {
  const triple = name => css(name).split(" ").map(Number);
  palette = {zero: triple("--zero"), blue: triple("--up"), orange: triple("--down")};
}

function metricTitle(name) {
  const [unit, sentence, lookFor] = DATA.metrics?.[name] || [];
  return sentence ? `${name}${unit ? ` (${unit})` : ""}: ${sentence} ${lookFor || ""}` : name;
}

// -------------------------------------------------------------------------------- steps and groups
function show(change = {}) {
  Object.assign(state, change);
  state.step = clamp(state.step, 0, Math.max(0, stepsOf().length - 1));
  state.group = clamp(state.group, 0, Math.max(0, theGroups().length - 1));
  find("steps").hidden = !theGroup();
  if (!theGroup()) return;
  state.episode = clamp(state.episode, 0, theGroup().episodes.length - 1);
  computeWhatIf();
  drawTimeline();
  drawChips();
  drawGroup();
  drawColours();
  drawEpisode();
  drawToken();
}

const goTo = change => show({token: null, pinned: false, ...change});

function drawHead() {
  const run = theRun(), {before = {}, after = {}} = run;
  const name = ["success", "pairs/accuracy", "held_out_loss", "loss", "reward"]
    .find(key => after[key] != null && before[key] != null);
  document.title = `${run.algorithm} · ${run.name}`;
  find("head").replaceChildren(
    h("div", {}, h("h1", {}, run.algorithm, h("small", {}, ` ${run.name}`)),
      h("p.facts", {}, [run.held_out && `${number(run.held_out)} held-out tasks`,
        `${number(run.steps.length)} steps`, run.seconds && `${number(Math.round(run.seconds))} s`,
        ...Object.entries(run.changed || {}).slice(0, 6).map(([k, v]) => `--${k} ${v}`)]
        .filter(Boolean).join(" · "))),
    name && h("div.result", {title: metricTitle(name)}, h("span.name", {}, name),
      h("b.before", {}, number(before[name])), h("span", {}, " → "), h("b.after", {}, number(after[name])),
      intervals(before, after, name)),
    DATA.runs.length > 1 && h("select", {"aria-label": "run", onchange: event => {
      state.run = Number(event.target.value);
      start();
    }}, DATA.runs.map((r, i) => h("option", {value: i, selected: i === state.run}, r.name))),
    h("button.toggle", {id: "class", "aria-pressed": String(state.klass), onclick: () => toggleClass(),
      title: "Large type; advantages are hidden until you reveal them"}, "for class"));
}

function intervals(before, after, name) {  // of a share, on a line from 0 to 1
  if (!after[`${name}_interval`]) return null;
  const line = (part, y, kind) => {
    const [low, high] = (part[`${name}_interval`] || [0, 0]).map(x => 4 + 172 * x);
    return [svg("line", {x1: low, x2: high, y1: y, y2: y, class: kind}),
      svg("circle", {cx: 4 + 172 * part[name], cy: y, r: 5, class: kind})];
  };
  return svg("svg", {viewBox: "0 0 180 30", width: 180, height: 30, role: "img",
    "aria-label": "before and after, with 95 % intervals"},
  svg("line", {x1: 4, x2: 176, y1: 15, y2: 15, class: "axis"}),
  line(before, 9, "before"), line(after, 21, "after"));
}

function drawTimeline() {
  const {steps} = theRun(), places = stepsOf().map(([step]) => step);
  const name = ["success", "reward", "accuracy", "loss"].find(key => steps.some(row => row[key] != null));
  const rows = steps.filter(row => Number.isFinite(row[name]));
  const width = find("timeline").clientWidth || 900, last = Math.max(1, ...places, ...rows.map(r => r.step));
  const values = rows.map(row => row[name]), high = Math.max(name === "success" ? 1 : -Infinity, ...values);
  const low = Math.min(name === "success" ? 0 : Infinity, ...values);
  const x = step => 8 + (width - 16) * step / last;
  const y = value => 44 - 38 * (value - low) / (high - low || 1);
  const now = places[state.step], row = rows.find(r => r.step === now);
  const line = rows.map(r => `${x(r.step)},${y(r[name])}`).join(" ");
  find("timeline").replaceChildren(
    h("p", {}, h("b", {}, `Step ${now}`), ` of ${last}`,
      row && h("span", {title: metricTitle(name)}, ` · ${name} ${number(row[name])}`)),
    svg("svg", {width, height: 50, onclick: event => goTo({step: nearest(places,
      (event.offsetX - 8) / (width - 16) * last), group: 0, episode: 0})},
    rows.length > 0 && svg("polygon", {class: "area", points: `${x(rows[0].step)},46 ${line} ${x(rows.at(-1).step)},46`}),
    svg("polyline", {class: "curve", points: line}),
    places.map(step => svg("line", {class: "tick", x1: x(step), x2: x(step), y1: 45, y2: 49})),
    (theRun().alarms || []).map(alarm => svg("path", {class: "alarm",
      d: `M${x(alarm.step)},34 l6,12 h-12 z`}, svg("title", {}, `ALARM, step ${alarm.step}: ${alarm.text}`))),
    svg("line", {class: "now", x1: x(now), x2: x(now), y1: 0, y2: 50}),
    row && svg("circle", {class: "now", cx: x(now), cy: y(row[name]), r: 5})),
    h("input", {type: "range", min: 0, max: places.length - 1, value: state.step, "aria-label": "step",
      oninput: event => goTo({step: Number(event.target.value), group: 0, episode: 0})}));
}

function nearest(places, step) {
  const distances = places.map(place => Math.abs(place - step));
  return distances.indexOf(Math.min(...distances));
}

function drawChips() {  // the groups of the step, each with the rewards of its episodes as bars
  const all = theGroups().flatMap(group => group.episodes.map(e => e.reward ?? 0));
  const low = Math.min(0, ...all), span = Math.max(...all, 0) - low || 1;
  find("chips").replaceChildren(...theGroups().map((group, g) => h("button.chip", {
    class: `chip${group.silent ? " silent" : ""}`, "aria-pressed": String(g === state.group),
    title: group.silent || group.task, onclick: () => goTo({group: g, episode: 0})},
  h("span.bars", {}, sorted(group).map(e => h("i", {style: {
    height: `${4 + 22 * ((e.reward ?? 0) - low) / span}px`}}))),
  h("span", {}, short(group.task, 34), h("small", {}, group.silent ? "teaches nothing"
    : group.isPair ? `margin ${number(group.margin)}`
      : `mean ${number(group.mean)}, std ${number(group.std)}`)))));
}

function callsText(episode) {  // the calls of an episode in one line
  const calls = (episode.calls || []).map(call => callText(call));
  return [...calls, episode.stop_reason].filter(Boolean).join(" → ");
}

function callText({name, arguments: given, error}) {
  const values = given && typeof given === "object" ? Object.values(given) : [given ?? ""];
  const text = values.map(v => typeof v === "string" ? v : JSON.stringify(v)).join(", ");
  return `${name}(${short(text, 60)})${error ? " ✗" : ""}`;
}

function drawGroup() {
  const group = theGroup(), episodes = sorted(group), rewards = episodes.map(e => e.reward ?? 0);
  const low = Math.min(0, ...rewards), span = Math.max(0, ...rewards) - low || 1;
  const percent = x => `${100 * (x - low) / span}%`;
  const largest = Math.max(1e-9, ...episodes.map(e => Math.abs(e.advantage ?? 0)));
  const rows = episodes.map((episode, e) => h("div.row", {"aria-current": String(e === state.episode),
    onclick: () => goTo({episode: e})},
  h("div.reward", {}, h("b", {}, group.isPair ? ["chosen ", "rejected "][e] : "", number(episode.reward)),
    h("span.track", {}, h("i", {style: {left: percent(Math.min(0, episode.reward)),
      width: `${100 * Math.abs(episode.reward ?? 0) / span}%`}}),
    h("em", {style: {left: percent(group.mean ?? 0)}}))),
  h("canvas.strip", {"data-episode": e}),
  advantageCell(group, episode, e, largest),
  h("div.calls", {}, callsText(episode), parts(episode))));
  find("group").replaceChildren(
    h("h2", {}, group.task),
    h("p.note", {}, h("b", {}, group.isPair ? `margin ${number(group.margin)}` : `mean ${number(group.mean)}`),
      group.isPair ? ` · implicit reward ${(group.implicit_reward || []).map(number).join(" and ")}`
        : `, std ${number(group.std)}, ${episodes.length} episodes. An episode is compared with its group's mean.`,
      isHidden(group) && h("button.reveal", {onclick: () => reveal(group)}, "Reveal the advantages")),
    group.silent && h("p.silence", {}, `This group teaches nothing: ${group.silent}.`),
    h("div.rows", {class: `rows${group.silent ? " silent" : ""}`}, h("div.heads", {}, h("span", {}, "reward, │ mean"),
      h("span", {}, state.whatIf ? "tokens: above as trained, below what if" : "the episode's tokens, from first to last"),
      h("span", {}, "advantage")), rows));
  for (const strip of document.querySelectorAll("canvas.strip")) drawStrip(strip, episodes);
}

const parts = episode => Object.entries(episode.parts || {}).length > 1
  && h("small", {}, Object.entries(episode.parts).map(([k, v]) => ` ${k} ${number(v)}`).join(" ·"));

function advantageCell(group, episode, e, largest) {
  const key = `${e}`, guess = guesses.get(group)?.[key], a = episode.advantage;
  if (isHidden(group)) {
    return h("div.advantage", {title: "Predict: will the update make this episode more likely or less?"},
      [["up", "▲"], ["down", "▼"]].map(([way, sign]) => h("button.guess", {"aria-label": `predict ${way}`,
        "aria-pressed": String(guess === way), onclick: event => {
          event.stopPropagation();
          guesses.set(group, {...guesses.get(group), [key]: way});
          drawGroup();
        }}, sign)));
  }
  const right = guess && (guess === "up") === (a > 0) && a !== 0;
  return h("div.advantage", {}, h("span.track", {}, a != null && h("i", {class: a < 0 ? "down" : "up", style: {
    left: `${50 + Math.min(0, 50 * a / largest)}%`, width: `${50 * Math.abs(a) / largest}%`}})),
  h("b", {}, a == null ? "–" : signed(a)), guess && h("small", {}, right ? " ✓" : " ✗"));
}

function reveal(group) {
  revealed.add(group);
  show();
}

// The value of a trained token by the choice of colour; of the what-if where `row` is its numbers.
function valueOf(numbers, i, row) {
  if (row && state.colour === "weight") return -row.weight[i];
  if (row && state.colour === "advantage") return row.advantage[i];
  if (row && state.colour === "clipped") return Number(row.stopped[i]);
  return COLOURS[colourNow()].of(numbers, i);
}

function colourNow() {
  const group = theGroup(), colour = COLOURS[state.colour];
  const has = !colour.needs || numbersOf(theEpisode(), state.last)[colour.needs];
  const tells = ["advantage", "weight", "clipped"].includes(state.colour) && isHidden(group);
  return has && !tells ? state.colour : "trained";
}

function largestValue() {  // of the group: where a colour is full
  let largest = 0;
  for (const episode of theGroup().episodes) {
    const numbers = numbersOf(episode, state.last), row = state.whatIf && whatIf.get(episode);
    for (let i = 0; i < episode.at.length; i++) {
      largest = Math.max(largest, Math.abs(valueOf(numbers, i)), row ? Math.abs(valueOf(numbers, i, row)) : 0);
    }
  }
  return largest || 1;
}

function drawStrip(canvas, episodes) {
  const episode = episodes[canvas.dataset.episode], numbers = numbersOf(episode, state.last);
  const dense = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = width * dense;
  canvas.height = height * dense;
  const pen = canvas.getContext("2d"), n = episode.tokens.length, step = canvas.width / n;
  const largest = largestValue(), isSigned = COLOURS[colourNow()].signed;
  const row = state.whatIf && whatIf.get(episode);
  const lanes = row ? [[null, 0, 0.5], [row, 0.5, 0.5]] : [[null, 0, 1]];
  pen.fillStyle = css("--context");
  pen.fillRect(0, canvas.height * 0.3, canvas.width, canvas.height * 0.4);
  numbers.slot.forEach((i, t) => {
    if (i < 0) return;
    for (const [what, top, share] of lanes) {
      pen.fillStyle = colourOf(valueOf(numbers, i, what) / largest, isSigned);
      pen.fillRect(Math.floor(t * step), canvas.height * top, Math.ceil(step), canvas.height * share);
    }
  });
  if (Number(canvas.dataset.episode) === state.episode && state.token != null) {
    pen.strokeStyle = css("--ink");
    pen.lineWidth = 2 * dense;
    pen.strokeRect(state.token * step, dense, Math.max(step, 4 * dense), canvas.height - 2 * dense);
  }
  const at = event => Math.floor(event.offsetX / canvas.clientWidth * n);
  const e = Number(canvas.dataset.episode);
  canvas.onmousemove = event => e === state.episode && !state.pinned && point(clamp(at(event), 0, n - 1));
  canvas.onclick = event => {
    event.stopPropagation();
    show({episode: e, token: clamp(at(event), 0, n - 1), pinned: true});
  };
}

function drawColours() {
  const numbers = numbersOf(theEpisode(), state.last), colour = COLOURS[colourNow()];
  const largest = largestValue(), write = colour.write || (x => signed(x));
  const ends = colour.signed ? [-largest, 0, largest] : colourNow() === "trained" ? [] : [0, largest];
  find("colours").replaceChildren(
    h("div.choices", {role: "group", "aria-label": "colour of the tokens"}, Object.entries(COLOURS).map(([name, {needs, says}]) =>
      h("button", {"aria-pressed": String(name === state.colour), title: says, disabled: Boolean(needs && !numbers[needs]),
        onclick: () => show({colour: name})}, name)),
    h("button.toggle", {onclick: () => show({last: !state.last}), title: "A step may update several times on the same "
      + "episodes; the ratio moves between the first and the last."}, state.last ? "last update" : "first update")),
    h("p.note", {}, h("span.legend", {}, ends.map(x => h("i", {style: {
      background: colourOf(x / largest, colour.signed)}}, x === 0 && !colour.write ? "0" : write(x)))), " ",
    isHidden(theGroup()) ? "Hidden until revealed. " : "", colour.says));
}

// -------------------------------------------------------------------------------------- episodes
function drawEpisode() {
  const group = theGroup(), shown = group.isPair ? sorted(group) : [theEpisode()];
  find("episode").replaceChildren(h("div", {class: group.isPair ? "beside" : ""}, shown.map((episode, e) =>
    h("div.talk", {}, h("h3", {}, group.isPair ? ["chosen", "rejected"][e] : `Episode ${state.episode + 1} of ${group.episodes.length}`,
      h("small", {}, ` reward ${number(episode.reward)}, ${episode.tokens.length} tokens, ${episode.at.length} trained`)),
    turns(episode, (t, node) => paint(episode, t, node, group.isPair ? e : state.episode))))));
}

function paint(episode, t, node, e) {  // colours a token's node and lets it be pointed at
  const numbers = numbersOf(episode, state.last), i = numbers.slot[t], row = state.whatIf && whatIf.get(episode);
  if (i >= 0) {
    const largest = paint.largest ??= largestValue(), isSigned = COLOURS[colourNow()].signed;
    node.style.backgroundColor = colourOf(valueOf(numbers, i, row) / largest, isSigned);
    if (row?.differs[i]) node.classList.add("differs");
    if (numbers.clipped?.[i] && !isHidden(theGroup())) node.classList.add("clipped");
  }
  node.onmouseenter = () => state.pinned || point(t, e);
  node.onclick = () => show({episode: e, token: t, pinned: !(state.pinned && state.token === t)});
}

// The turns of an episode: what the policy wrote is open, context and tool results are folded.
function turns(episode, decorate) {
  let k = 0;
  return episode.turns.map((turn, place) => {
    const text = h("pre", {});
    for (let t = turn.start; t < turn.end; t++) {
      const node = h(turn.trained ? "i.tok.trained" : "i.tok", {"data-t": t}, episode.tokens[t].replace(/\n/g, "↵\n"));
      decorate(t, node);
      text.append(node);
    }
    if (turn.trained) {
      const reward = episode.turn_rewards?.[k++];
      return h("div.turn.assistant", {}, h("span.role", {}, turn.role), text, reward != null
        && h("b.badge", {class: `badge ${reward > 0 ? "up" : reward < 0 ? "down" : ""}`, title: "this turn's reward"}, signed(reward)));
    }
    const calls = (episode.calls || []).filter(call => call.turn === place - 1);
    const words = calls.length ? calls.map(call => `${callText(call)} = ${call.result}`).join("; ")
      : episode.tokens.slice(turn.start, turn.end).join("");
    return h("details.turn", {class: `turn ${turn.role}`}, h("summary", {}, h("span.role", {}, turn.role), short(words, 110)), text);
  });
}

// ---------------------------------------------------------------------------------------- tokens
function point(token, episode = state.episode) {
  if (episode !== state.episode) return;
  state.token = token;
  drawToken();
}

function drawToken() {
  document.querySelector(".tok.here")?.classList.remove("here");
  const panel = find("token"), episode = theEpisode(), t = state.token;
  panel.classList.toggle("empty", t == null);
  if (t == null) {
    panel.replaceChildren(h("p.note", {}, "Point at a token: its numbers stand here, and the equation that trained it, filled in."));
    return;
  }
  find("episode").querySelectorAll(`[data-t="${t}"]`)[theGroup().isPair ? state.episode : 0]?.classList.add("here");
  const numbers = numbersOf(episode, state.last), i = numbers.slot[t];
  const turn = episode.turns.find(({end}) => t < end), hidden = isHidden(theGroup());
  const facts = i < 0 ? [] : [["probability", numbers.sampled && Math.exp(numbers.sampled[i]), "when it was sampled"],
    ["old log p", numbers.old?.[i], "of the policy that sampled"], ["log p", numbers.new?.[i], "of the policy in training"],
    ["ref. log p", numbers.ref?.[i], "of the policy the run started from"],
    ["ratio", numbers.old && Math.exp(numbers.new[i] - numbers.old[i]), "exp(log p − old log p)"],
    ["entropy", numbers.entropy?.[i], "nats"], ["clipped", numbers.clipped && (numbers.clipped[i] ? "yes" : "no"), "no gradient through the clip"],
    ["advantage", hidden ? null : numbers.advantage?.[i], "against the group"],
    ["weight", hidden ? null : numbers.weight?.[i], "d loss / d log p, as the run computed it"]];
  panel.replaceChildren(h("h3", {}, h("code.text", {}, JSON.stringify(episode.tokens[t]).slice(1, -1)),
    h("small", {}, ` id ${episode.ids?.[t]}, ${t + 1} of ${episode.tokens.length}, ${turn?.role ?? ""}`)),
  i < 0 ? h("p.note", {}, "Context: the policy did not write it, so it is not trained.")
    : h("dl", {}, facts.filter(([, value]) => value != null).map(([name, value, why]) =>
      h("div", {title: why}, h("dt", {}, name), h("dd", {}, number(value))))),
  i >= 0 && !hidden && numbers.weight && equation(episode, i));
}

// The loss of a token with its numbers filled in, and the line of the run's file that computed it.
function equation(episode, i) {
  const o = state.whatIf || settingsOf(theRun()), row = whatIf.get(episode), loss = LOSSES[o.loss];
  const source = (theRun().equations || []).find(entry => entry.loss === o.loss.split(":").at(-1)) || {};
  const formula = loss?.formula || source.formula || "-w logp";
  const n = numbersOf(episode, state.last), A = row.advantage[i], tau = A > 0 ? 1 : 1.05;
  const known = {A, r: row.ratio[i], logp: n.new[i], e_low: o.clip_eps_low, e_high: o.clip_eps_high, tau,
    k: A >= 0 ? 2 : 3, lambda: A >= 0 ? 3 : 2, w: A, beta: o.beta, kl: row.kl[i]};
  const pieces = formula.split(/([A-Za-z_]+)/);
  return h("div.equation", {}, h("p.note", {}, state.whatIf ? `what if: ${o.loss}` : `the loss of this token, ${o.loss}`),
    h("code", {}, formula),
    h("code", {}, "= ", pieces.map(piece => piece in known ? h("b", {title: piece}, number(known[piece])) : piece)),
    o.kl_coef > 0 && h("code", {}, "+ ", h("b", {title: "kl_coef"}, number(o.kl_coef)), " KL ", h("b", {title: "KL"}, number(row.kl[i]))),
    h("code", {}, "= ", h("b.result", {}, number(row.loss[i]))),
    h("p.note", {}, "Its slope, times the share of the token in the step: ", h("b", {}, number(row.weight[i])),
      row.stopped[i] ? ". The clip stops it." : ""),
    source.file && h("p.note", {}, h("code", {}, `${source.file}:${source.line}`), h("code", {}, source.code)));
}

// --------------------------------------------------------------------------------------- what if
const whatIf = new Map();  // episode -> tokenWeights' row of the settings asked for, with `differs`

function settingsOf(run) {
  const f = run.flags || {}, own = {grpo: f.loss || "grpo", sft: "sft:nll",
    reward_weighted: `reward_weighted:${f.weighting || "exp"}`, dpo: `dpo:${(f.loss || "sigmoid").split(",")[0]}`};
  return {loss: own[run.algorithm] || "grpo", credit: f.credit || "episode", scale_rewards: f.scale_rewards || "group",
    clip_eps_low: f.clip_eps_low ?? 0.2, clip_eps_high: f.clip_eps_high ?? f.clip_eps_low ?? 0.2,
    kl_coef: f.kl_coef || 0, kl_estimator: f.kl_estimator || "k3_ratio", beta: f.beta ?? 0.1,
    sft_coef: f.sft_coef ?? 1, importance_correction: f.importance_correction};
}

function computeWhatIf() {  // of all recorded episodes of the step
  const episodes = [], rows = [];
  theGroups().forEach((group, g) => sorted(group).forEach((episode, e) => {
    const n = numbersOf(episode, state.last), turnsOf = Math.max(1, ...n.turn.map(k => k + 1));
    const rewards = episode.turn_rewards?.length >= turnsOf ? [...episode.turn_rewards] : Array(turnsOf).fill(0);
    if (group.isPair) rewards[rewards.length - 1] += 1 - e - sum(rewards);
    const changed = state.whatIf && g === state.group && e === state.episode;
    if (changed) rewards[rewards.length - 1] += Number(state.whatIf.reward_added || 0);
    episodes.push(episode);
    rows.push({group: g, rewards, turn: n.turn, logp: Array.from(n.new), old: n.old, ref: n.ref, sampled: n.sampled});
  }));
  const line = theRun().steps.find(row => row.step === stepsOf()[state.step][0]) || {};
  const tokens = sum(rows.map(row => row.logp.length));
  const counts = {sequences: line.episodes || rows.length, max_tokens: theRun().flags?.max_tokens || 1024,
    tokens: Math.round(line.sampled_tokens * line.episodes) || tokens};
  const own = settingsOf(theRun()), asked = tokenWeights(rows, {...own, ...state.whatIf}, counts);
  // Adam divides the scale of a loss away: compared is how it shares its push among the tokens.
  const recorded = episodes.map(episode => numbersOf(episode, state.last).weight || []);
  const scale = sum(recorded.flatMap(w => Array.from(w, Math.abs))) / (sum(asked.flatMap(r => r.weight.map(Math.abs))) || 1) || 1;
  const outcome = {ways: 0, sizes: 0, tokens};
  whatIf.clear();
  episodes.forEach((episode, e) => {
    asked[e].differs = asked[e].weight.map((w, i) => {
      const before = recorded[e][i] ?? w, after = w * scale;
      const tiny = 1e-3 * Math.abs(before - after) < 1e-12;
      const other = !tiny && Math.sign(before) !== Math.sign(after);
      outcome.ways += other;
      outcome.sizes += !other && Math.abs(before - after) > 0.1 * Math.abs(before);
      return other;
    });
    if (state.whatIf) asked[e].weight = asked[e].weight.map(w => w * scale);
    whatIf.set(episode, asked[e]);
  });
  find("outcome").textContent = state.whatIf ? `These two losses disagree on ${outcome.ways} of ${tokens} tokens of the step `
    + `(one pushes up, the other down or not at all), and on ${outcome.sizes} more by over 10 % in size.` : "";
}

function fillForm() {
  const own = settingsOf(theRun()), form = find("whatif");
  for (const input of form.elements) if (input.name in own) input.value = own[input.name];
  form.elements.reward_added.value = 0;
  labelForm();
}

function labelForm() {
  for (const output of find("whatif").querySelectorAll("output")) {
    output.textContent = number(Number(find("whatif").elements[output.htmlFor.value].value));
  }
}

function ask(event) {
  const form = find("whatif"), values = Object.fromEntries(new FormData(form));
  for (const input of form.elements) if (input.type === "range") values[input.name] = Number(input.value);
  if (event.target.name === "loss") Object.assign(values, {scale_rewards: "group", ...LOSSES[values.loss]?.paper});
  for (const input of form.elements) if (input.name in values) input.value = values[input.name];
  labelForm();
  show({whatIf: values, colour: "weight"});
}

// ----------------------------------------------------------------------- the same task over steps
function occurrences() {  // {task: [{label, episodes}]} of all runs, of tasks that occur twice
  const found = {};
  DATA.runs.forEach((run, r) => {
    const name = DATA.runs.length > 1 ? `${run.name} ` : "";
    for (const {step, when, episode} of run.played || []) {
      (found["the held-out task that is played before and after"] ??= []).push({label: `${name}${when}`, step, episodes: [episode]});
    }
    for (const [step, groups] of PLAY[r]) {
      for (const group of groups) (found[group.task] ??= []).push({label: `${name}step ${step}`, step, run: r, episodes: sorted(group)});
    }
  });
  return Object.entries(found).filter(([, list]) => list.length > 1);
}

function drawSame() {
  const tasks = occurrences(), section = find("same");
  section.hidden = !tasks.length;
  if (!tasks.length) return;
  const [, list] = tasks[clamp(state.same, 0, tasks.length - 1)];
  const right = clamp(state.right ?? list.length - 1, 0, list.length - 1), left = clamp(state.left ?? 0, 0, list.length - 1);
  const now = list[right].episodes[0];
  const common = episode => {
    const n = episode.ids.findIndex((id, t) => id !== now.ids[t]);
    return n < 0 ? Math.min(episode.ids.length, now.ids.length) : n;
  };
  const earlier = [...list[left].episodes].sort((a, b) => common(b) - common(a))[0], parting = common(earlier);
  const all = list.flatMap(item => item.episodes.map(e => e.reward ?? 0)), low = Math.min(...all), span = Math.max(...all) - low || 1;
  const slider = (key, value) => h("label", {}, `${key} `, h("input", {type: "range", min: 0, max: list.length - 1, value,
    oninput: event => { state[key] = Number(event.target.value); drawSame(); }}));
  section.replaceChildren(h("h2", {}, "The same task over steps"),
    h("select", {"aria-label": "task", onchange: event => { Object.assign(state, {same: Number(event.target.value), left: null, right: null}); drawSame(); }},
      tasks.map(([task, items], i) => h("option", {value: i, selected: i === state.same}, `${short(task, 60)} (${items.length})`))),
    h("div.dots", {}, list.map((item, i) => h("button", {title: item.label, "aria-pressed": String(i === right),
      onclick: () => { state.right = i; drawSame(); }}, svg("svg", {width: 26, height: 60}, item.episodes.map((e, k) =>
      svg("circle", {cx: 13 + 3 * (k % 3 - 1), cy: 54 - 48 * ((e.reward ?? 0) - low) / span, r: 3.5}))), h("small", {}, item.label)))),
    h("p.note", {}, slider("left", left), slider("right", right), "Framed: the first token where the right episode leaves the left one."),
    h("div.beside", {}, [[list[left], earlier], [list[right], now]].map(([item, episode]) => h("div.talk", {},
      h("h3", {}, item.label, h("small", {}, ` reward ${number(episode.reward)}, ${episode.stop_reason ?? ""}`)),
      turns(episode, (t, node) => t === parting ? node.classList.add("parting") : t < parting && node.classList.add("common"))))));
}

// ---------------------------------------------------------------------------------------- curves
const LARGE = [["success", /^(success|played_success|accuracy)$/], ["reward and its parts", /^reward(\/|$)/],
  ["margin", /^(margin|logprobs\/)/], ["entropy", /^entropy$/], ["KL", /^(kl|approx_kl)$/], ["lengths", /^(tokens|sampled_tokens)$/],
  ["turns", /^(turns|actions)$/], ["silent groups", /^groups_(without_signal|all_right|all_wrong)$/], ["loss", /^(loss|held_out_loss)$/]];
const plots = [];

function drawCurves() {
  plots.splice(0).forEach(plot => plot.destroy());
  const names = [...new Set(DATA.runs.flatMap(run => run.steps.flatMap(row => Object.keys(row))))]
    .filter(name => name !== "step" && DATA.runs.some(run => run.steps.some(row => Number.isFinite(row[name]))));
  const used = new Set(), large = h("div.cards"), small = h("div.cards.small");
  for (const [title, pattern] of LARGE) {
    const own = names.filter(name => pattern.test(name) && !used.has(name));
    own.forEach(name => used.add(name));
    if (own.length) large.append(card(title, own));
  }
  const rest = names.filter(name => !used.has(name));
  find("curves").hidden = !names.length;
  find("curves").replaceChildren(h("h2", {}, "Curves"),
    h("p.note", {}, "Thin: as logged. Bold: smoothed. Click a step to see its groups."),
    large, h("ul.alarms", {}, DATA.runs.flatMap((run, r) => (run.alarms || []).map(alarm => h("li", {}, h("button", {
      onclick: () => openStep(r, alarm.step)}, `▲ step ${alarm.step}`), ` ${alarm.text}`)))),
    rest.length > 0 && h("details", {ontoggle: event => {
      if (event.target.open && !small.children.length) small.append(...rest.map(name => card(name, [name])));
      if (event.target.open) plot();
    }}, h("summary", {}, `${rest.length} more numbers`), small));
  plot();
}

function card(title, names) {
  const node = h("figure", {}, h("figcaption", {title: names.map(metricTitle).join("\n")}, h("b", {}, title),
    h("small", {}, ` ${DATA.metrics?.[names[0]]?.[1] ?? ""}`)));
  node.names = names;
  return node;
}

function plot() {  // the cards that have no curve yet
  for (const node of document.querySelectorAll("#curves figure")) {
    if (node.querySelector(".uplot") || !node.clientWidth) continue;
    const names = DATA.runs.length > 1 ? node.names.slice(0, 1) : node.names;
    const steps = [...new Set(DATA.runs.flatMap(run => run.steps.map(row => row.step)))].sort((a, b) => a - b);
    const series = [{label: "step"}], columns = [steps];
    DATA.runs.forEach((run, r) => {
      const rows = new Map(run.steps.map(row => [row.step, row]));
      names.forEach((name, k) => {
        const values = steps.map(step => rows.get(step)?.[name] ?? null), colour = css(`--line${(r + k) % 5}`);
        const label = DATA.runs.length > 1 ? run.name : name, dash = [[], [8, 4], [2, 4]][Math.floor((r + k) / 2) % 3];
        series.push({stroke: `${colour}66`, width: 1, label: ""}, {stroke: colour, width: 2.5, label, dash,
          value: (u, x) => number(x), points: {show: steps.length < 3}});
        columns.push(values, smooth(values));
      });
    });
    const axis = {stroke: css("--soft"), grid: {stroke: css("--line")}, ticks: {show: false}, font: "13px system-ui"};
    plots.push(new uPlot({width: node.clientWidth, height: node.closest(".small") ? 120 : 210, series, scales: {x: {time: false}},
      axes: [axis, {...axis, size: 52, values: (u, ticks) => ticks.map(number)}], legend: {live: true},
      cursor: {drag: {x: false, y: false}}, hooks: {draw: [u => marks(u, names[0])]}}, columns, node));
    const made = plots.at(-1);
    made.over.onclick = () => made.cursor.idx != null && openStep(state.run, steps[made.cursor.idx]);
  }
}

function smooth(values) {  // a centred mean over an eighth of the run
  const reach = Math.max(1, Math.round(values.length / 16));
  return values.map((x, i) => {
    const near = values.slice(Math.max(0, i - reach), i + reach + 1).filter(Number.isFinite);
    return x == null || !near.length ? null : mean(near);
  });
}

function marks(u, name) {  // before and after with intervals at the edges, ALARMs on the axis
  const pen = u.ctx, dense = devicePixelRatio, {left, top, width, height} = u.bbox;
  pen.save();
  DATA.runs.forEach((run, r) => {
    pen.fillStyle = pen.strokeStyle = DATA.runs.length > 1 ? css(`--line${r % 5}`) : css("--ink");
    pen.lineWidth = 2 * dense;
    [[run.before, left + 6 * dense], [run.after, left + width - 6 * dense]].forEach(([part, x]) => {
      if (part?.[name] == null) return;
      const y = value => u.valToPos(value, "y", true), [low, high] = part[`${name}_interval`] || [part[name], part[name]];
      pen.beginPath();
      pen.moveTo(x, clamp(y(low), top, top + height));
      pen.lineTo(x, clamp(y(high), top, top + height));
      pen.stroke();
      pen.beginPath();
      pen.arc(x, clamp(y(part[name]), top, top + height), 4 * dense, 0, 7);
      pen.fill();
    });
    pen.fillStyle = css("--alarm");
    for (const {step} of run.alarms || []) {
      const x = u.valToPos(step, "x", true), y = top + height;
      pen.fill(new Path2D(`M${x},${y - 10 * dense} l${6 * dense},${10 * dense} h${-12 * dense} z`));
    }
  });
  pen.restore();
}

function openStep(run, step) {
  state.run = run;
  goTo({step: nearest(stepsOf().map(([s]) => s), step), group: 0, episode: 0});
  find("steps").scrollIntoView({behavior: "smooth"});
}

// ------------------------------------------------------------------------------------------ runs
function drawCompare() {
  const {runs} = DATA;
  find("compare").hidden = runs.length < 2;
  if (runs.length < 2) return;
  const names = [...new Set(runs.flatMap(run => Object.keys(run.flags || {})))].filter(name => name !== "output_dir"
    && new Set(runs.map(run => JSON.stringify(run.flags?.[name] ?? null))).size > 1);
  const name = runs[0].after?.success != null ? "success" : "pairs/accuracy";
  const interval = run => run.after?.[`${name}_interval`];
  const verdicts = runs.slice(1).filter(run => interval(run) && interval(runs[0])).map(run => {
    const [d, low, high] = difference(runs[0].after[name], interval(runs[0]), run.after[name], interval(run));
    const beyond = low > 0 || high < 0;
    return h("p", {}, h("b", {}, run.name), ` ${d < 0 ? "solves less" : "solves more"} than `, h("b", {}, runs[0].name),
      `: ${signed(d)} (95 %: ${signed(low)} to ${signed(high)}). `, h("b", {}, beyond ? "Beyond chance." : "Within chance."));
  });
  const row = (title, cells) => h("tr", {}, h("th", {}, title), cells.map(cell => h("td", {}, cell)));
  find("compare").replaceChildren(h("h2", {}, "Run beside run"), verdicts,
    h("div.wide", {}, h("table", {}, row("", runs.map((run, r) => h("b", {class: `run${r % 5}`}, run.name))),
      row(name, runs.map(run => [h("span", {}, `${number(run.before?.[name])} → ${number(run.after?.[name])}`), intervals(run.before || {}, run.after || {}, name)])),
      row("seconds", runs.map(run => number(run.seconds))), names.map(flag => row(`--${flag}`, runs.map(run => String(run.flags?.[flag] ?? "–")))))));
}

function drawSettings() {
  const pairs = values => h("dl", {}, Object.entries(values || {}).map(([k, v]) => h("div", {}, h("dt", {}, k), h("dd", {}, String(v)))));
  find("settings").replaceChildren(h("details", {}, h("summary", {}, "All flags of the run"), pairs(theRun().flags)));
  find("foot").textContent = `Written by ${DATA.written_by}. One file, nothing is loaded. Keys: ← → token, ↑ ↓ episode, `
    + "Shift with ↑ ↓ group, Shift with ← → step, c colour, r reveal, Esc release.";
}

// ------------------------------------------------------------------------------------------ keys
function toggleClass() {
  state.klass = !state.klass;
  document.body.classList.toggle("class", state.klass);
  start();
}

function onKey(event) {
  if (!theGroup() || event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  const way = {ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1}[event.key], names = Object.keys(COLOURS);
  const page = {PageDown: 1, PageUp: -1}[event.key];  // what a presenter's clicker sends
  if (way && event.shiftKey) {
    goTo(event.key.endsWith("t") ? {step: state.step + way, group: 0, episode: 0} : {group: state.group + way, episode: 0});
  } else if (way && /Up|Down/.test(event.key)) goTo({episode: state.episode + way});
  else if (way) {
    const {at} = theEpisode(), i = state.token == null ? (way > 0 ? -1 : at.length) : at.filter(t => t < state.token + (way > 0)).length - (way > 0);
    show({token: at[clamp(i + way, 0, at.length - 1)] ?? null, pinned: true});
  } else if (event.key === "r" || page > 0 && isHidden(theGroup())) reveal(theGroup());
  else if (page) goTo({group: state.group + page, episode: 0});
  else if (event.key === "c") show({colour: names[(names.indexOf(state.colour) + 1) % names.length]});
  else if (event.key === "Escape") show({token: null, pinned: false, whatIf: null});
  else return;
  event.preventDefault();
}

function start() {
  readPalette();
  drawHead();
  fillForm();
  show({whatIf: null});
  drawSame();
  drawCompare();
  drawSettings();
  requestAnimationFrame(drawCurves);
}

function main() {
  DATA = JSON.parse(find("data").textContent);
  PLAY = DATA.runs.map(run => {
    const byStep = new Map();
    for (const group of groupsOf(run)) byStep.set(group.step, [...(byStep.get(group.step) || []), group]);
    return [...byStep].sort(([a], [b]) => a - b);
  });
  find("whatif").addEventListener("input", ask);
  find("whatif").addEventListener("reset", event => {
    event.preventDefault();
    fillForm();
    show({whatIf: null});
  });
  document.addEventListener("keydown", onKey);
  let width = innerWidth;
  addEventListener("resize", () => innerWidth !== width && (width = innerWidth, start()));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", start);
  start();
}

if (typeof document !== "undefined") main();
else module.exports = {tokenWeights, CREDITS, LOSSES, NORMALIZERS, PAIR_LOSSES, SURROGATES, difference, groupAdvantages, klEstimate, pairLoss};
