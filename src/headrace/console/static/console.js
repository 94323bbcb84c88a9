// Live parts of the console. Without this file every page still shows and every form still works.
"use strict";

const trouble = (text) => {
  const place = document.getElementById("trouble");
  if (!place) return;
  place.hidden = !text;
  place.textContent = text || "";
};

// A stream that the browser opens again by itself. `handlers` are called with the data of each event.
const follow = (address, handlers) => {
  const source = new EventSource(address);
  source.addEventListener("error", () => {
    if (document.getElementById("trouble").hidden) trouble("The connection is lost. The page continues by itself as soon as it is back.");
  });
  source.addEventListener("trouble", (event) => trouble(event.data));
  source.addEventListener("refused", (event) => {
    source.close();
    trouble(event.data);
    const progress = document.getElementById("progress");
    if (progress) progress.textContent = "Refused";
  });
  for (const [name, handle] of Object.entries(handlers)) {
    source.addEventListener(name, (event) => {
      trouble("");
      handle(event.data, source);
    });
  }
  window.addEventListener("pagehide", () => source.close());
  return source;
};

const fragment = (html) => {
  const template = document.createElement("template");
  template.innerHTML = html;
  return template.content;
};

const addCopyButtons = (place) => {
  for (const button of place.querySelectorAll("button.copy")) button.hidden = !navigator.clipboard;
};

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button.copy");
  if (!button) return;
  const around = button.closest(".command, .body");
  const content = around.querySelector("code, .value");
  // Folded parts are not rendered as text, so the text of all nodes is taken.
  await navigator.clipboard.writeText(content.textContent);
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
});

// The theme changes when another is chosen; the button is for pages without JavaScript.
const theme = document.getElementById("theme");
if (theme) {
  theme.form.classList.add("scripted");
  theme.addEventListener("change", () => theme.form.submit());
}

// Overview: the server sends the whole part again.
const live = document.querySelector("[data-live]");
if (live) {
  follow(live.dataset.live, {
    replace: (html) => {
      if (!live.contains(document.activeElement)) live.replaceChildren(fragment(html));
    },
  });
}

// Lists that are filtered while one types. The address follows, so that it can be shared.
for (const form of document.querySelectorAll("form[data-filter]")) {
  const list = document.querySelector(form.dataset.filter);
  let timer = 0;
  let number = 0;
  form.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(async () => {
      const query = new URLSearchParams(new FormData(form));
      const mine = ++number;
      const address = `${form.action.split("?")[0]}?${query}`;
      const reply = await fetch(`${address}&part=1`).catch(() => null);
      if (!reply || !reply.ok || reply.redirected || mine !== number) return;
      list.innerHTML = await reply.text();
      history.replaceState(null, "", address);
    }, 150);
  });
}

// Search: matches arrive one by one, and the button ends it.
const records = document.getElementById("records");
const progress = document.getElementById("progress");
const streaming = document.querySelector("input[data-stream]");
if (streaming) streaming.value = "1";

if (records && records.dataset.search) {
  const stop = document.getElementById("stop");
  const source = follow(records.dataset.search, {
    row: (html) => {
      records.append(fragment(html));
      addCopyButtons(records.lastElementChild);
    },
    progress: (text) => {
      const counts = JSON.parse(text);
      progress.textContent = `${counts.found} found in ${counts.scanned} records; ${counts.left} left`;
    },
    done: (html) => {
      document.getElementById("more").replaceChildren(fragment(html));
      end("Finished");
    },
  });
  const end = (word) => {
    source.close();
    stop.hidden = true;
    progress.textContent = `${word}: ${progress.textContent}`;
  };
  // A search does not begin again by itself: its matches are here already.
  source.addEventListener("error", () => end("Interrupted"));
  stop.hidden = false;
  stop.addEventListener("click", () => end("Stopped"));
}

// Live tail: the newest first, at most 500 on the page. While it pauses, new ones wait.
if (records && records.dataset.tail) {
  const most = 500;
  const pause = document.getElementById("pause");
  let waiting = [];
  let paused = false;
  let shown = 0;
  const say = () => {
    progress.textContent = paused ? `Paused, ${waiting.length} waiting` : `Live, ${shown} received`;
  };
  const add = (html) => {
    records.prepend(fragment(html));
    addCopyButtons(records.firstElementChild);
    shown += 1;
    while (records.childElementCount > most) records.lastElementChild.remove();
  };
  follow(records.dataset.tail, {
    begin: say,
    row: (html) => {
      if (paused) {
        waiting.push(html);
        if (waiting.length > most) waiting.shift();
      } else add(html);
      say();
    },
    skipped: (count) => {
      shown += Number(count);
      say();
    },
  });
  pause.hidden = false;
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.textContent = paused ? "Continue" : "Pause";
    if (!paused) {
      waiting.forEach(add);
      waiting = [];
    }
    say();
  });
}

// A broker that was away: look for it and load the page again.
if (document.querySelector("[data-retry]")) {
  const again = async () => {
    const reply = await fetch(location.href, { cache: "no-store" }).catch(() => null);
    if (reply && reply.status !== 503) location.reload();
    else setTimeout(again, 2000);
  };
  setTimeout(again, 2000);
}

addCopyButtons(document);
