"""The sentences of the embedded corpus, in five languages, with slots that `phrases.py` fills.

A frame is one sentence in five languages; `{slot}` is replaced by a value. Slots are only where no language inflects
the value, or where `phrases.py` generates the right form ("am Dienstag", "ve středu"). The nouns below have the one
form that their frames need: `item` and `event` as a subject with its article, `goods` after a quantity, `building`
after "construction".
"""

LANGUAGES = ("de", "en", "fr", "es", "cs")

FRAMES = [
    # Dates
    (
        "Wir treffen uns {on_date}, {at_time}.",
        "We are meeting {on_date} {at_time}.",
        "Nous nous retrouvons {on_date} {at_time}.",
        "Nos vemos {on_date}, {at_time}.",
        "Sejdeme se {on_date} {at_time}.",
    ),
    (
        "{event} findet {on_date} statt.",
        "{event} takes place {on_date}.",
        "{event} a lieu {on_date}.",
        "{event} tiene lugar {on_date}.",
        "{event} se koná {on_date}.",
    ),
    (
        "Lieferung {on_date}, spätestens {at_time}.",
        "Delivery {on_date}, {at_time} at the latest.",
        "Livraison {on_date}, {at_time} au plus tard.",
        "Entrega {on_date}, {at_time} como muy tarde.",
        "Doručení {on_date}, nejpozději {at_time}.",
    ),
    (
        "{name} hat am {day} Geburtstag.",
        "{name}'s birthday is on {day}.",
        "L'anniversaire de {name} est le {day}.",
        "El cumpleaños de {name} es el {day}.",
        "{name} slaví narozeniny {day}.",
    ),
    (
        "Name: {name}, Geburtsdatum: {short_date}",
        "Name: {name}, date of birth: {short_date}",
        "Nom : {name}, date de naissance : {short_date}",
        "Nombre: {name}, fecha de nacimiento: {short_date}",
        "Jméno: {name}, datum narození: {short_date}",
    ),
    (
        "Der Vertrag läuft vom {since} bis zum {until}.",
        "The contract runs from {since} to {until}.",
        "Le contrat court du {since} au {until}.",
        "El contrato va del {since} al {until}.",
        "Smlouva platí od {since} do {until}.",
    ),
    (
        "Der Ausweis ist bis zum {until} gültig.",
        "The card is valid until {until}.",
        "La carte est valable jusqu'au {until}.",
        "El carné es válido hasta el {until}.",
        "Průkaz platí do {until}.",
    ),
    (
        "{name} arbeitet seit dem {since} hier.",
        "{name} has been working here since {since}.",
        "{name} travaille ici depuis le {since}.",
        "{name} trabaja aquí desde el {since}.",
        "{name} tu pracuje od {since}.",
    ),
    (
        "Die Rechnung vom {short_date} ist noch offen.",
        "The invoice dated {short_date} is still unpaid.",
        "La facture du {short_date} est encore impayée.",
        "La factura del {short_date} sigue pendiente.",
        "Faktura ze dne {short_date} je stále neuhrazená.",
    ),
    (
        "Ausstellung mit Bildern von {name}: {interval}",
        "Exhibition of pictures by {name}: {interval}",
        "Exposition de tableaux de {name} : {interval}",
        "Exposición de cuadros de {name}: {interval}",
        "Výstava obrazů, {name}: {interval}",
    ),
    # Times
    (
        "Der Zug {route} fährt {at_time} ab.",
        "The {route} train leaves {at_time}.",
        "Le train {route} part {at_time}.",
        "El tren {route} sale {at_time}.",
        "Vlak {route} odjíždí {at_time}.",
    ),
    (
        "Der Flug {route} landet {weekday} {at_time}.",
        "The {route} flight lands {weekday} {at_time}.",
        "Le vol {route} atterrit {weekday} {at_time}.",
        "El vuelo {route} aterriza {weekday} {at_time}.",
        "Let {route} přistává {weekday} {at_time}.",
    ),
    (
        "Das Museum ist {weekday} von {opens} bis {closes} Uhr geöffnet.",
        "The museum is open {weekday} from {opens} to {closes}.",
        "Le musée est ouvert {weekday} de {opens} à {closes}.",
        "El museo está abierto {weekday} de {opens} a {closes}.",
        "Muzeum je otevřeno {weekday} od {opens} do {closes}.",
    ),
    (
        "{name} kommt {weekday} {at_time} nach Hause.",
        "{name} comes home {weekday} {at_time}.",
        "{name} rentre à la maison {weekday} {at_time}.",
        "{name} vuelve a casa {weekday} {at_time}.",
        "{name} se vrací domů {weekday} {at_time}.",
    ),
    (
        "{event} beginnt {at_time} und dauert {duration}.",
        "{event} begins {at_time} and lasts {duration}.",
        "{event} commence {at_time} et dure {duration}.",
        "{event} empieza {at_time} y dura {duration}.",
        "{event} začíná {at_time} a trvá {duration}.",
    ),
    (
        "Die Sitzung wurde von {opens} auf {closes} Uhr verschoben.",
        "The meeting was moved from {opens} to {closes}.",
        "La réunion a été déplacée de {opens} à {closes}.",
        "La reunión se ha cambiado de las {opens} a las {closes}.",
        "Schůze byla přesunuta z {opens} na {closes}.",
    ),
    (
        "{event} beginnt {soon}.",
        "{event} begins {soon}.",
        "{event} commence {soon}.",
        "{event} empieza {soon}.",
        "{event} začíná {soon}.",
    ),
    (
        "Das Angebot von {name} endet {soon}.",
        "The offer from {name} ends {soon}.",
        "L'offre de {name} se termine {soon}.",
        "La oferta de {name} termina {soon}.",
        "Nabídka od uživatele {name} končí {soon}.",
    ),
    (
        "Die Nachricht von {name} kam {ago}.",
        "The message from {name} came {ago}.",
        "Le message de {name} est arrivé {ago}.",
        "El mensaje de {name} llegó {ago}.",
        "Zpráva od uživatele {name} přišla {ago}.",
    ),
    # Prices and shares
    (
        "{item} kostet {cost}.",
        "{item} costs {cost}.",
        "{item} coûte {cost}.",
        "{item} cuesta {cost}.",
        "{item} stojí {cost}.",
    ),
    (
        "{item} kostet jetzt {euros} statt {old_euros}.",
        "{item} now costs {euros} instead of {old_euros}.",
        "{item} coûte maintenant {euros} au lieu de {old_euros}.",
        "{item} cuesta ahora {euros} en lugar de {old_euros}.",
        "{item} nyní stojí {euros} místo {old_euros}.",
    ),
    (
        "{purchase} {goods} kosten {cost}.",
        "{purchase} {goods} cost {cost}.",
        "{purchase} {goods} coûtent {cost}.",
        "{purchase} {goods} cuestan {cost}.",
        "{purchase} {goods} stojí {cost}.",
    ),
    (
        "Abrechnung für {month}: {price}",
        "Statement for {month}: {price}",
        "Relevé de compte, {month} : {price}",
        "Extracto de {month}: {price}",
        "Vyúčtování za {month}: {price}",
    ),
    (
        "{name} hat {price} auf dem Konto.",
        "{name} has {price} in the bank.",
        "{name} a {price} sur son compte.",
        "{name} tiene {price} en la cuenta.",
        "{name} má na účtu {price}.",
    ),
    (
        "Bitte überweisen Sie {price} bis zum {until}.",
        "Please transfer {price} by {until}.",
        "Veuillez virer {price} avant le {until}.",
        "Transfiera {price} antes del {until}, por favor.",
        "Převeďte prosím {price} do {until}.",
    ),
    (
        "Bis zum {day} gibt es {percent} Rabatt.",
        "There is a discount of {percent} until {day}.",
        "Jusqu'au {day}, la remise est de {percent}.",
        "Hasta el {day} hay un descuento del {percent}.",
        "Do {day} platí sleva {percent}.",
    ),
    (
        "Der Umsatz ist um {percent} auf {price} gestiegen.",
        "Revenue rose by {percent} to {price}.",
        "Le chiffre d'affaires a augmenté de {percent} pour atteindre {price}.",
        "Los ingresos aumentaron un {percent} hasta {price}.",
        "Tržby vzrostly o {percent} na {price}.",
    ),
    # Measures and counts
    (
        "Die Strecke {route} ist {distance} lang.",
        "The {route} route is {distance} long.",
        "Le trajet {route} fait {distance}.",
        "El trayecto {route} mide {distance}.",
        "Trasa {route} měří {distance}.",
    ),
    (
        "{weekday} waren es {temperature}.",
        "{weekday} it was {temperature}.",
        "{weekday}, il faisait {temperature}.",
        "{weekday} hubo {temperature}.",
        "{weekday} bylo {temperature}.",
    ),
    (
        "Der Wind erreicht {weekday} {speed}.",
        "The wind reaches {speed} {weekday}.",
        "Le vent atteint {speed} {weekday}.",
        "El viento alcanza {speed} {weekday}.",
        "Vítr dosahuje {weekday} {speed}.",
    ),
    (
        "Die Wohnung hat {area} und kostet {euros} im Monat.",
        "The apartment has {area} and costs {euros} a month.",
        "L'appartement fait {area} et coûte {euros} par mois.",
        "El piso tiene {area} y cuesta {euros} al mes.",
        "Byt má {area} a stojí {euros} měsíčně.",
    ),
    (
        "{name} läuft {run} in {duration}.",
        "{name} runs {run} in {duration}.",
        "{name} court {run} en {duration}.",
        "{name} corre {run} en {duration}.",
        "{name} uběhne {run} za {duration}.",
    ),
    (
        "In den Tank passen {volume}.",
        "The tank holds {volume}.",
        "Le réservoir contient {volume}.",
        "El depósito contiene {volume}.",
        "Do nádrže se vejde {volume}.",
    ),
    (
        "Das Paket von {name} wiegt {mass}.",
        "The package from {name} weighs {mass}.",
        "Le colis de {name} pèse {mass}.",
        "El paquete de {name} pesa {mass}.",
        "{name} posílá balík, který váží {mass}.",
    ),
    (
        "Im Stadion sind {crowd} Zuschauer.",
        "There are {crowd} spectators in the stadium.",
        "Il y a {crowd} spectateurs dans le stade.",
        "Hay {crowd} espectadores en el estadio.",
        "Na stadionu je {crowd} diváků.",
    ),
    # Spelled-out numbers
    (
        "{name} liest das {ordinal} Kapitel.",
        "{name} is reading the {ordinal} chapter.",
        "{name} lit le {ordinal} chapitre.",
        "{name} lee el capítulo {ordinal}.",
        "{name} čte {ordinal} kapitolu.",
    ),
    (
        "Heute beginnt in {town} das {ordinal} Turnier.",
        "The {ordinal} tournament begins today in {town}.",
        "Le {ordinal} tournoi commence aujourd'hui à {town}.",
        "El torneo {ordinal} empieza hoy en {town}.",
        "{town}: dnes začíná {ordinal} turnaj.",
    ),
    (
        "Der Bau {building} begann im Jahr {year}.",
        "The construction {building} began in {year}.",
        "La construction {building} a commencé en {year}.",
        "La construcción {building} empezó en {year}.",
        "Stavba {building} začala v roce {year}.",
    ),
    (
        "Der Roman spielt im Jahr {year}.",
        "The novel is set in {year}.",
        "Le roman se déroule en {year}.",
        "La novela está ambientada en {year}.",
        "Román se odehrává v roce {year}.",
    ),
    (
        "{name} nennt die Zahl {number}.",
        "{name} says the number {number}.",
        "{name} dit le nombre {number}.",
        "{name} dice el número {number}.",
        "{name} říká číslo {number}.",
    ),
    (
        "Stückzahl: {quantity}",
        "Quantity: {quantity}",
        "Quantité : {quantity}",
        "Cantidad: {quantity}",
        "Počet kusů: {quantity}",
    ),
    # Lists
    (
        "Teilnehmende Länder: {countries}.",
        "Participating countries: {countries}.",
        "Pays participants : {countries}.",
        "Países participantes: {countries}.",
        "Zúčastněné země: {countries}.",
    ),
    (
        "Unsere Reiseziele {weekday}: {towns}.",
        "Our destinations {weekday}: {towns}.",
        "Nos destinations {weekday} : {towns}.",
        "Nuestros destinos {weekday}: {towns}.",
        "Naše cíle {weekday}: {towns}.",
    ),
    (
        "Verfügbare Sprachen: {languages}.",
        "Available languages: {languages}.",
        "Langues disponibles : {languages}.",
        "Idiomas disponibles: {languages}.",
        "Dostupné jazyky: {languages}.",
    ),
]

NOUNS = {
    "item": [
        ("das Fahrrad", "the bicycle", "le vélo", "la bicicleta", "kolo"),
        ("der Tisch", "the table", "la table", "la mesa", "stůl"),
        ("die Lampe", "the lamp", "la lampe", "la lámpara", "lampa"),
        ("der Mantel", "the coat", "le manteau", "el abrigo", "kabát"),
        ("die Fahrkarte", "the ticket", "le billet", "el billete", "jízdenka"),
        ("das Buch", "the book", "le livre", "el libro", "kniha"),
        ("der Koffer", "the suitcase", "la valise", "la maleta", "kufr"),
        ("die Kamera", "the camera", "l'appareil photo", "la cámara", "fotoaparát"),
        ("das Zimmer", "the room", "la chambre", "la habitación", "pokoj"),
        ("der Schrank", "the wardrobe", "l'armoire", "el armario", "skříň"),
        ("die Uhr", "the watch", "la montre", "el reloj", "hodinky"),
        ("der Drucker", "the printer", "l'imprimante", "la impresora", "tiskárna"),
    ],
    "event": [
        ("das Konzert", "the concert", "le concert", "el concierto", "koncert"),
        ("der Film", "the film", "le film", "la película", "film"),
        ("die Vorlesung", "the lecture", "la conférence", "la conferencia", "přednáška"),
        ("das Spiel", "the match", "le match", "el partido", "zápas"),
        ("der Kurs", "the course", "le cours", "el curso", "kurz"),
        ("die Führung", "the guided tour", "la visite guidée", "la visita guiada", "prohlídka"),
        ("die Prüfung", "the exam", "l'examen", "el examen", "zkouška"),
        ("das Fest", "the party", "la fête", "la fiesta", "oslava"),
        ("das Rennen", "the race", "la course", "la carrera", "závod"),
    ],
    "goods": [
        ("Äpfel", "of apples", "de pommes", "de manzanas", "jablek"),
        ("Kartoffeln", "of potatoes", "de pommes de terre", "de patatas", "brambor"),
        ("Kirschen", "of cherries", "de cerises", "de cerezas", "třešní"),
        ("Tomaten", "of tomatoes", "de tomates", "de tomates", "rajčat"),
        ("Nüsse", "of nuts", "de noix", "de nueces", "ořechů"),
        ("Birnen", "of pears", "de poires", "de peras", "hrušek"),
        ("Trauben", "of grapes", "de raisins", "de uvas", "hroznů"),
        ("Zwiebeln", "of onions", "d'oignons", "de cebollas", "cibule"),
    ],
    "building": [
        ("der Brücke", "of the bridge", "du pont", "del puente", "mostu"),
        ("der Kirche", "of the church", "de l'église", "de la iglesia", "kostela"),
        ("des Museums", "of the museum", "du musée", "del museo", "muzea"),
        ("des Bahnhofs", "of the station", "de la gare", "de la estación", "nádraží"),
        ("des Rathauses", "of the town hall", "de la mairie", "del ayuntamiento", "radnice"),
        ("der Schule", "of the school", "de l'école", "de la escuela", "školy"),
        ("des Turms", "of the tower", "de la tour", "de la torre", "věže"),
        ("des Hafens", "of the harbor", "du port", "del puerto", "přístavu"),
        ("des Theaters", "of the theater", "du théâtre", "del teatro", "divadla"),
        ("der Bibliothek", "of the library", "de la bibliothèque", "de la biblioteca", "knihovny"),
    ],
}

NAMES = (  # with one spelling in all five languages, and a first letter before which French keeps "de"
    "Maria Peter Laura Martin Sofia David Julia Thomas Clara Felix Nina Robert Paula Simon Vera Daniel Lea Viktor "
    "Marta Karl"
)

# Codes for which CLDR has a name in each language; the cities are time zones of Europe.
TERRITORIES = (
    "AT BE BG BR CA CH CL CN CO CU CZ DE DK EG ES FI FR GR HR HU ID IE IL IN IS IT JP KE KR LT LV MA MX NO NZ PE PL "
    "PT RO RS SE SI SK TH UA VN"
)
LANGUAGE_CODES = "ar bg cs da de el en es et fi fr he hi hr hu is it ja ko lt lv nl no pl pt ro ru sk sl sv uk"
CITIES = (
    "Berlin Vienna Zurich Paris London Rome Madrid Prague Warsaw Brussels Copenhagen Lisbon Athens Budapest Amsterdam "
    "Belgrade Bucharest Luxembourg Stockholm Oslo Helsinki Sofia Vilnius Istanbul"
)
CURRENCIES = "EUR EUR EUR USD GBP CHF JPY"  # drawn uniformly, so the euro is the most common
