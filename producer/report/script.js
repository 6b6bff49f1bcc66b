"use strict";
(() => {
  const PAGE = 100;
  const FIELDS = ["number", "id", "example", "sample", "stop", "reward", "turns", "tokens", "time", "error"];
  const data = JSON.parse(document.getElementById("data").textContent);
  const rows = data.rows.map((row) => Object.fromEntries(FIELDS.map((name, at) => [name, row[at]])));
  const byId = new Map(rows.map((row) => [row.id, row]));
  const at = (id) => document.getElementById(id);
  const texts = new Map();
  let shown = rows, page = 0, current = null;

  // Everything from the results goes through here: as text, never as HTML.
  const make = (tag, kind, text, parent) => {
    const element = document.createElement(tag);
    if (kind) element.className = kind;
    if (text !== undefined) element.textContent = text;
    if (parent) parent.append(element);
    return element;
  };

  const words = (row) => {
    if (!texts.has(row.number)) {
      const detail = data.details[row.number];
      const held = detail ? JSON.stringify(detail) : "";
      texts.set(row.number, `${row.id} ${row.example} ${row.error} ${held}`.toLowerCase());
    }
    return texts.get(row.number);
  };

  const passes = (row, filter) => {
    if (filter === "failed") return row.stop === "has_error" || row.stop === "agent_timeout";
    if (filter === "held") return row.number in data.details;
    return !filter || row.stop === filter;
  };

  const select = () => {
    const wanted = at("search").value.trim().toLowerCase();
    const filter = at("filter").value, sort = at("sort").value;
    shown = rows.filter((row) => passes(row, filter) && (!wanted || words(row).includes(wanted)));
    if (sort) {
      const name = sort.slice(0, -1), way = sort.endsWith("-") ? -1 : 1;
      const missing = (row) => row[name] === null;
      shown = [...shown].sort((a, b) => missing(a) - missing(b) || way * (a[name] - b[name]));
    }
    page = 0;
    list();
  };

  const list = () => {
    const pages = Math.max(1, Math.ceil(shown.length / PAGE));
    const first = page * PAGE;
    at("list").replaceChildren(...shown.slice(first, first + PAGE).map(entry));
    at("list").scrollTop = 0;
    at("where").textContent = shown.length
      ? `${first + 1}–${Math.min(first + PAGE, shown.length)} of ${shown.length}` : "none";
    at("back").disabled = page === 0;
    at("next").disabled = page >= pages - 1;
  };

  const entry = (row) => {
    const item = document.createElement("li");
    const button = make("button", row.number in data.details ? "" : "none", undefined, item);
    button.type = "button";
    if (current && row.number === current.number) button.setAttribute("aria-current", "true");
    make("span", "id", row.id, button);
    const ended = row.stop === "completed" ? (row.reward === null ? "completed" : "") : row.stop.replace("_", " ");
    make("span", `reward ${row.stop}`, [ended, row.reward].filter((part) => part !== "" && part !== null).join(" · "), button);
    const about = `${row.example}${row.sample ? ` #${row.sample}` : ""} · ${row.turns} turns · ${row.tokens} tokens · ${row.time} s`;
    make("span", "sub", row.error ? `${about} · ${row.error}` : about, button);
    button.addEventListener("click", () => {
      open(row);
      history.replaceState(null, "", `#${encodeURIComponent(row.id)}`);
      if (window.matchMedia("(max-width: 800px)").matches) at("detail").scrollIntoView();
    });
    return item;
  };

  const turn = (found, parent) => {
    const head = make("h4", "", `Turn ${found.n} `, parent);
    const notes = [found.p === null ? "no tokens" : `${found.p} + ${found.c} tokens`];
    if (found.cut) notes.push("truncated");
    if (found.new) notes.push("the agent changed its history");
    make("small", "", notes.join(", "), head);
    for (const said of found.says) {
      const role = said.role.split(" ")[0];
      make("div", ["user", "assistant", "tool"].includes(role) ? `role ${role}` : "role", said.role, parent);
      if (said.why) make("pre", "why", said.why, parent);
      if (said.text) make("pre", "", said.text, parent);
      for (const [name, given] of said.calls) {
        make("div", "call", `→ ${name}`, parent);
        make("pre", "", given, parent);
      }
    }
  };

  const open = (row) => {
    current = row;
    const place = at("detail");
    place.replaceChildren();
    make("h3", "", row.id, place);
    const detail = data.details[row.number];
    const facts = make("dl", "pairs", undefined, place);
    const own = [["ended", row.stop.replace("_", " ")], ["example", `${row.example}, sample ${row.sample}`],
      ["turns", row.turns], ["tokens", row.tokens], ["time", `${row.time} s`]];
    for (const [name, value] of [...own, ...(detail ? detail.facts : [])]) {
      const pair = make("div", "", undefined, facts);
      make("dt", "", name, pair);
      make("dd", "", String(value), pair);
    }
    if (!detail) {
      if (row.error) make("pre", "wrong", row.error, place);
      make("p", "note", "This rollout's trajectory is not in the page; rollouts show prints it.", place);
    } else {
      if (detail.error) make("pre", "wrong", detail.error, place);
      const half = detail.left ? detail.turns.length / 2 : -1;
      detail.turns.forEach((found, number) => {
        if (number === half) make("p", "note", `… ${detail.left} turns are left out …`, place);
        turn(found, place);
      });
      for (const attempt of detail.attempts) {
        make("h4", "", `Before it: ${attempt.title}`, place);
        make("pre", "wrong", attempt.error, place);
        for (const found of attempt.turns) turn(found, place);
      }
      for (const [name, text] of [["Standard output", detail.stdout], ["Standard error", detail.stderr]]) {
        if (!text) continue;
        make("h4", "", `${name} (its end)`, place);
        make("pre", "", text, place);
      }
    }
    place.focus({ preventScroll: true });
    for (const button of at("list").querySelectorAll("button")) button.removeAttribute("aria-current");
    const place_ = shown.indexOf(row) - page * PAGE;
    const mine = place_ >= 0 && place_ < PAGE ? at("list").children[place_] : null;
    if (mine) mine.firstChild.setAttribute("aria-current", "true");
  };

  const follow = () => {
    let id = "";
    try { id = decodeURIComponent(location.hash.slice(1)); } catch { return; }
    if (!byId.has(id)) return;
    const place = shown.indexOf(byId.get(id));
    if (place >= 0) { page = Math.floor(place / PAGE); list(); }
    open(byId.get(id));
    const mine = at("list").querySelector("[aria-current]");
    if (mine) at("list").scrollTop = mine.parentNode.offsetTop - at("list").clientHeight / 2;
    at("browser").scrollIntoView();
  };

  let pause;
  at("search").addEventListener("input", () => { clearTimeout(pause); pause = setTimeout(select, 150); });
  for (const name of ["filter", "sort"]) at(name).addEventListener("change", select);
  at("tools").addEventListener("submit", (event) => event.preventDefault());
  at("back").addEventListener("click", () => { page -= 1; list(); });
  at("next").addEventListener("click", () => { page += 1; list(); });
  window.addEventListener("hashchange", follow);
  list();
  const first = rows.find((row) => row.number in data.details);
  if (first) open(first);
  follow();
})();
