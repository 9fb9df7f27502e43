"use strict";
// The replies of the report: coloured text, and the draft tree of the chosen round. Every text is set as text, never as
// markup. DATA: {names, words, replies: [{id, category, turn, asked, modes: {key: {pieces, runs, accepted, finish,
// trees?, paths?, own?, apart?}}}]}; a tree is {t: tokens, p: parents, s: path scores, e?: edge scores}, scores in hundredths.
(() => {
  const viewer = document.getElementById("viewer");
  if (!viewer) return;
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const MANY_REPLIES = 10, DEEPEST_COLOUR = 6, LABEL_WIDTH = 118;
  const ENDS = {
    eos: "ended by its end token", length: "ended by the token limit", stop: "ended by a stop string", cancelled: "cancelled",
  };
  const state = { reply: 0, mode: null, round: 0 };
  const pen = document.createElement("canvas").getContext("2d");

  const SVG = "http://www.w3.org/2000/svg";
  function fill(node, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined) node.setAttribute(name, value);
    }
    node.append(...children);
    return node;
  }
  const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
  const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

  // what has no glyph, or would turn the text around, is named; line ends stay and are marked
  const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;
  const named = (text) => text.replace(UNSEEN, (c) => `[U+${c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}]`);
  const inline = (text) => named(text).replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ +| +$/g, (s) => "␣".repeat(s.length));
  // parts of characters look alike, and so do tokens without text: their ids tell them apart
  const word = (token) => {
    const text = DATA.words[token] ?? "";
    return /^\ufffd*$/.test(text) ? `${text}#${token}` : inline(text);
  };
  const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

  // drafts of a tree: what becomes of every row, and the token that the target chose in its place
  function readTree(mode, round) {
    const { t: tokens, p: parents, s: scores, e: edges } = mode.trees[round];
    const taken = [0, ...mode.paths[round]], own = mode.own[round], level = [];
    parents.forEach((parent) => level.push(parent < 0 ? 0 : level[parent] + 1));
    // after the row of each level of the path: the next one's token, or the target's own; none where the reply ended
    const chosen = [...mode.paths[round].map((row) => tokens[row]), own];
    const rows = tokens.map((token, row) => {
      const parent = parents[row], reached = taken.includes(parent);
      const fate = row === 0 ? "root" : taken.includes(row) ? "taken" : reached ? "refused" : "unreached";
      const edge = edges ? edges[row] : scores[row] - (scores[parent] ?? 0);
      const instead = fate === "refused" ? chosen[level[row] - 1] : null;
      return { row, token, parent, level: level[row], fate, score: scores[row] / 100, edge: edge / 100, instead };
    });
    if (own !== null) {
      const parent = taken[taken.length - 1];
      rows.push({ row: rows.length, token: own, parent, level: level[parent] + 1, fate: "own", score: null, edge: null });
    }
    return rows;
  }

  const share = (log) => (log <= -5.3 ? "<.01" : Math.exp(log) > 0.995 ? "1.0" : Math.exp(log).toFixed(2).slice(1));

  function fateOf(node) {
    switch (node.fate) {
      case "root": return "root: the last token before this round";
      case "taken": return `accepted at level ${node.level}`;
      case "own": return `the target's own token, at level ${node.level}`;
      case "refused": return node.instead === null ? "not decided: the reply ended here" : `refused: the target chose ${quoted(node.instead)} here`;
      default: return "not reached: the draft before it was not accepted";
    }
  }
  // isolated: the words around it keep their order whatever its script
  const quoted = (token) => `“\u2068${word(token)}\u2069”`;

  function describe(node) {
    const parts = [`${quoted(node.token)} (token ${node.token})`, `level ${node.level}`];
    if (node.edge !== null && node.row > 0) parts.push(`draft score ${Math.exp(node.edge).toFixed(3)}`, `whole path ${Math.exp(node.score).toFixed(3)}`);
    return `${parts.join(" · ")} · ${fateOf(node)}`;
  }

  // pickers

  function picker(what, options, chosen, choose) {
    const box = el("div", { class: "pick", role: "group", "aria-label": what }, el("span", { class: "what" }, what));
    if (options.length > MANY_REPLIES) {
      const list = el("select", { "aria-label": what, onchange: (event) => choose(options[event.target.value][0]) });
      options.forEach(([key, name], at) => list.append(el("option", { value: at, selected: key === chosen ? "" : null }, name)));
      box.append(list);
      return box;
    }
    for (const [key, name] of options) {
      box.append(el("button", { type: "button", "aria-pressed": String(key === chosen), onclick: () => choose(key) }, name));
    }
    return box;
  }

  function show() {
    const reply = DATA.replies[state.reply], keys = Object.keys(reply.modes);
    if (!keys.includes(state.mode)) state.mode = keys.reduce((best, key) => (nodes(reply.modes[key]) > nodes(reply.modes[best]) ? key : best));
    const mode = reply.modes[state.mode];
    state.round = liveliest(mode);
    const replies = DATA.replies.map((r, at) => [at, named(`${r.id}${r.turn > 1 ? `, turn ${r.turn}` : ""} · ${r.category}`)]);
    viewer.replaceChildren(
      picker("Reply", replies, state.reply, (at) => { state.reply = at; show(); refocus("Reply"); }),
      picker("Mode", keys.map((key) => [key, DATA.names[key] ?? key]), state.mode, (key) => { state.mode = key; show(); refocus("Mode"); }),
      el("p", { class: "asked", dir: "auto", tabindex: 0, "aria-label": "prompt" }, named(reply.asked)),
      legend(mode),
      counts(mode),
      replyText(mode),
      el("div", { id: "round" }),
    );
    showRound(mode);
  }

  // the pickers were made anew
  function refocus(what) {
    viewer.querySelector(`.pick[aria-label="${what}"] :is([aria-pressed="true"], select)`)?.focus();
  }

  // per round; the mode with the largest trees is shown first
  const nodes = (mode) => (mode.trees ?? []).reduce((sum, tree) => sum + tree.t.length, 0) / Math.max(1, mode.runs.length);

  // the first round with the longest accepted path says most
  const liveliest = (mode) => mode.accepted.reduce((best, count, at) => (count > mode.accepted[best] ? at : best), 0);

  function legend(mode) {
    const items = [el("li", {}, el("span", { class: "tok prefill" }, "prefill"))];
    const deepest = Math.min(Math.max(0, ...mode.accepted), DEEPEST_COLOUR);
    for (let level = 1; level <= deepest; level++) {
      const more = level === DEEPEST_COLOUR ? " or deeper" : "";
      items.push(el("li", {}, el("span", { class: `tok n${level}` }, `draft, level ${level}${more}`)));
    }
    items.push(el("li", {}, el("span", { class: "tok own" }, "the target's own")));
    return el("ul", { class: "legend" }, ...items);
  }

  function counts(mode) {
    const tokens = mode.runs.reduce((sum, run) => sum + run, 0), rounds = mode.runs.length;
    const parts = [`${plural(mode.pieces.length, "token")} after a prompt of ${mode.prompt}`];
    parts.push(rounds ? `${plural(rounds, "round")} of ${(tokens / rounds).toFixed(2)} tokens` : "no round: the prefill gives the first token, and the reply ended with it");
    parts.push(ENDS[mode.finish] ?? mode.finish);
    const apart = mode.apart === null || mode.apart === undefined ? "" : ` Decoded once more to show its rounds, it parted from the measured reply at token ${mode.apart + 1}: rounding, or draws that follow the trees.`;
    return el("p", { class: "counts" }, parts.filter(Boolean).join("; ") + "." + apart);
  }

  // the reply, a span per round

  function tokenSpan(piece, kind, title) {
    const span = el("span", { class: `tok ${kind}`, title });
    if (piece === "") span.append(el("span", { class: "mark-char", title: `${title}; a part of the next character` }, "·"));
    piece.split("\n").forEach((line, at) => {
      if (at) span.append(el("span", { class: "mark-char" }, "⏎"), "\n");
      span.append(named(line));
    });
    return span;
  }

  function replyText(mode) {
    const box = el("div", { class: "reply", role: "listbox", "aria-label": "rounds of the reply", dir: "auto", onkeydown: steer });
    if (mode.pieces.length) box.append(fill(tokenSpan(mode.pieces[0], "prefill", "from the prefill"), { role: "presentation" }, []));
    let at = 1;
    mode.runs.forEach((run, round) => {
      const accepted = mode.accepted[round];
      const label = `round ${round + 1}: ${plural(run, "token")}, ${plural(accepted, "draft")} accepted`;
      const span = el("span", { class: "round", role: "option", "data-round": round, "aria-label": label, onclick: () => choose(round) });
      for (let i = 0; i < run; i++, at++) {
        const level = i + 1, drafted = i < accepted;
        const how = drafted ? `draft accepted at level ${level}` : "the target's own";
        span.append(tokenSpan(mode.pieces[at], drafted ? `n${Math.min(level, DEEPEST_COLOUR)}` : "own", `round ${round + 1}: ${how}`));
      }
      box.append(span);
    });
    return box;
  }

  function steer(event) {
    const last = current().runs.length - 1;
    const to = { ArrowRight: state.round + 1, ArrowDown: state.round + 1, ArrowLeft: state.round - 1, ArrowUp: state.round - 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    choose(Math.min(Math.max(to, 0), last));
    viewer.querySelector('.round[aria-selected="true"]')?.focus();
  }

  const current = () => DATA.replies[state.reply].modes[state.mode];

  function choose(round) {
    state.round = round;
    showRound(current());
  }

  // the chosen round

  function showRound(mode) {
    for (const span of viewer.querySelectorAll(".round")) {
      const chosen = Number(span.dataset.round) === state.round;
      span.setAttribute("aria-selected", String(chosen));
      span.setAttribute("tabindex", chosen ? 0 : -1);
    }
    document.getElementById("round").replaceChildren(...(mode.runs.length ? roundParts(mode) : []));
  }

  function stepButton(name, by, mode) {
    const to = state.round + by, inside = to >= 0 && to < mode.runs.length;
    const go = () => {
      choose(to);
      const again = document.querySelector(`#round button[data-by="${by}"]`);
      if (!again.disabled) again.focus();
    };
    return el("button", { type: "button", "data-by": by, disabled: inside ? null : "", onclick: go }, name);
  }

  function roundParts(mode) {
    const head = el("div", { class: "round-head" },
      el("h3", {}, `Round ${state.round + 1} of ${mode.runs.length}`), stepButton("← earlier", -1, mode), stepButton("later →", 1, mode));
    if (!mode.trees) {
      return [head, el("p", { class: "counts" }, `${plural(mode.runs[state.round], "token")} emitted. Trees are kept of the head's own modes, and of replies that were decoded once more for this page.`)];
    }
    const rows = readTree(mode, state.round);
    const drafts = mode.trees[state.round].t.length - 1, accepted = mode.accepted[state.round];
    const said = drafts
      ? `${plural(drafts, "draft")} verified in one forward, ${accepted} accepted, ${plural(mode.runs[state.round], "token")} emitted. Numbers are draft scores: how likely the head holds a token after those before it.`
      : "This round drafted nothing: a plain step of the target.";
    const told = el("p", { class: "told", "aria-live": "polite" });
    return [head, el("p", { class: "counts" }, said), treeLegend(rows), drawTree(rows, told), told, nodeTable(rows)];
  }

  function treeLegend(nodes) {
    const names = { root: "root", taken: "accepted", refused: "refused", unreached: "not reached", own: "the target's own" };
    const items = Object.entries(names).filter(([fate]) => nodes.some((node) => node.fate === fate));
    return el("ul", { class: "legend" }, ...items.map(([fate, name]) => el("li", {}, el("span", { class: `key-box ${fate}` }), name)));
  }

  function nodeTable(nodes) {
    const head = ["row", "token", "level", "after row", "draft score", "path score", "what became of it"];
    const number = (value) => (value === null ? "-" : Math.exp(value).toFixed(3));
    const body = nodes.map((node) => [node.fate === "own" ? "-" : node.row, word(node.token), node.level, node.parent < 0 ? "-" : node.parent,
      node.row ? number(node.edge) : "-", node.row ? number(node.score) : "-", fateOf(node)]);
    return el("details", {}, el("summary", {}, "The tree as a table"),
      el("div", { class: "scroll", tabindex: 0 }, el("table", { class: "nodes" },
        el("thead", {}, el("tr", {}, ...head.map((cell) => el("th", { scope: "col" }, cell)))),
        el("tbody", {}, ...body.map((row) => el("tr", {}, ...row.map((cell) => el("td", {}, String(cell)))))))));
  }

  // drawing: a column per level; a leaf takes a line, a node stands on the line of its first child. What was emitted is
  // drawn before its siblings, so that it is the top line however large the tree is; the others follow by score

  const HEIGHT = 24, PITCH = 31, GAP = 34, TOP = 30, EDGE = 12;

  function place(nodes) {
    const children = nodes.map(() => []);
    nodes.forEach((node, at) => node.parent >= 0 && children[node.parent].push(at));
    const emitted = (at) => nodes[at].fate === "taken" || nodes[at].fate === "own";
    children.forEach((row) => row.sort((a, b) => emitted(b) - emitted(a)));
    let line = 0;
    // without recursion: a chain may be a thousand levels deep
    const stack = [0];
    while (stack.length) {
      const at = stack.pop();
      nodes[at].line = line;
      if (children[at].length) stack.push(...children[at].slice().reverse());
      else line++;
    }
    nodes.forEach((node, at) => { node.children = children[at]; });
    return line;
  }

  function shorten(text) {
    if (pen.measureText(text).width <= LABEL_WIDTH) return text;
    const letters = Array.from(text);
    while (letters.length > 1 && pen.measureText(letters.join("") + "…").width > LABEL_WIDTH) letters.pop();
    return letters.join("") + "…";
  }

  function columns(nodes) {
    pen.font = `12.5px ${getComputedStyle(document.body).fontFamily}`;
    const widths = [];
    for (const node of nodes) {
      node.label = shorten(word(node.token));
      const scored = node.fate !== "root" && node.fate !== "own";
      const width = Math.max(44, pen.measureText(node.label).width + (scored ? 52 : 20));
      widths[node.level] = Math.max(widths[node.level] ?? 0, Math.ceil(width));
    }
    const starts = [EDGE];
    widths.forEach((width, level) => starts.push(starts[level] + width + GAP));
    return { widths, starts };
  }

  function drawTree(nodes, told) {
    const lines = place(nodes), { widths, starts } = columns(nodes);
    const width = starts[widths.length] - GAP + EDGE, height = TOP + lines * PITCH + 4;
    const drawing = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "tree", "aria-label": `draft tree of round ${state.round + 1}` });
    widths.forEach((_, level) => drawing.append(svg("text", { class: "level", x: starts[level], y: 18, "aria-hidden": "true" }, level ? `level ${level}` : "root")));
    const middle = (node) => TOP + node.line * PITCH + HEIGHT / 2;
    for (const node of nodes.filter((node) => node.parent >= 0)) {
      const above = nodes[node.parent], x = starts[above.level] + widths[above.level], to = starts[node.level], bend = (x + to) / 2;
      const path = `M${x},${middle(above)}C${bend},${middle(above)} ${bend},${middle(node)} ${to},${middle(node)}`;
      // marked links lie on top
      drawing[node.fate === "refused" || node.fate === "unreached" ? "prepend" : "append"](svg("path", { class: `link ${node.fate}`, d: path, "aria-hidden": "true" }));
    }
    const groups = nodes.map((node) => nodeGroup(node, starts[node.level], widths[node.level], told));
    drawing.append(...groups);
    drawing.addEventListener("keydown", (event) => walk(event, nodes, groups));
    groups[0].setAttribute("tabindex", 0);
    const deepest = nodes.reduce((best, node) => (node.fate === "taken" || node.fate === "own" ? node : best), nodes[0]);
    told.textContent = describe(deepest);
    return el("div", { class: "tree" }, drawing);
  }

  function nodeGroup(node, x, width, told) {
    const y = TOP + node.line * PITCH, text = describe(node);
    const tell = () => {
      told.textContent = text;
      for (const other of viewer.querySelectorAll(".node.current")) other.classList.remove("current");
    };
    const group = svg("g", { class: `node ${node.fate}`, role: "treeitem", tabindex: -1, "aria-level": node.level + 1, "aria-label": text, onmouseenter: tell, onfocus: tell, onclick: (event) => event.currentTarget.focus() },
      svg("title", {}, text), svg("rect", { x, y, width, height: HEIGHT, rx: 3 }),
      // anchored in the middle: the place does not depend on the direction of the script
      svg("text", { x: x + 8 + pen.measureText(node.label).width / 2, y: y + 16.5, "text-anchor": "middle" }, node.label));
    if (node.edge !== null && node.row > 0) group.append(svg("text", { class: "score", x: x + width - 7, y: y + 16.5 }, share(node.edge)));
    return group;
  }

  function walk(event, nodes, groups) {
    const at = groups.indexOf(document.activeElement);
    if (at < 0) return;
    const node = nodes[at], column = nodes.filter((other) => other.level === node.level).sort((a, b) => a.line - b.line);
    const beside = (by) => column[column.indexOf(node) + by];
    const to = { ArrowRight: nodes[node.children[0]], ArrowLeft: nodes[node.parent], ArrowDown: beside(1), ArrowUp: beside(-1), Home: nodes[0] }[event.key];
    if (!event.key.startsWith("Arrow") && event.key !== "Home") return;
    event.preventDefault();
    if (to === undefined) return;
    groups[at].setAttribute("tabindex", -1);
    const group = groups[nodes.indexOf(to)];
    group.setAttribute("tabindex", 0);
    group.focus();
  }

  show();
})();
